"""`cluster=inline`: the roles in this process, one rank each, without Ray. A debugger steps through everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tandem.platform.batch import Prompt, Rollout
from tandem.platform.protocols import Sampling
from tandem.workers.groups import compare_checksums
from tandem.workers.rollout import RolloutWorker


class InlineRollouts:
    """The `Rollouts` protocol over one worker in this process: what is submitted is sampled at once."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        """Samples now; the ticket is the result."""
        return self.worker.generate(prompts, sampling)

    def collect(self, ticket: Any) -> list[Rollout]:
        """The samples of a ticket."""
        return list(ticket)

    def load_weights(self, bucket: dict[str, Tensor]) -> None:
        """Takes one part of new weights."""
        self.worker.load_weights(bucket)

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Declares the weights complete; raises WeightSyncError naming a tensor that did not arrive as sent."""
        compare_checksums(checksums, self.worker.finish_weights(version), "the rollout engine")

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""
        return self.worker.memory()
