"""`cluster=inline`: all roles run in this process, one rank each, without Ray, so a debugger can step through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.platform.experience.batch import Prompt, Rollout
from tandem.platform.loop.protocols import Sampling
from tandem.workers.roles.rollout import RolloutWorker
from tandem.workers.sync.checksums import compare_checksums
from tandem.workers.sync.transports import Sent


class InlineRollouts:
    """Implements the `Rollouts` protocol with one worker in this process; `submit` samples immediately."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        """Samples immediately; the ticket is the result."""
        return self.worker.generate(prompts, sampling), sampling.samples

    restarts = 0

    def finished(self, ticket: Any) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields (index of a prompt, its samples)."""
        rollouts, samples = ticket
        yield from enumerate(rollouts[start : start + samples] for start in range(0, len(rollouts), samples))

    def collect(self, ticket: Any) -> list[Rollout]:
        """The samples of a ticket."""
        return list(ticket[0])

    def abandon(self) -> None:
        """Frees device memory. There is no work in progress between calls."""
        self.worker.sleep()

    def begin_weights(self) -> None:
        """Does nothing: `load_weights` receives the weights directly."""

    def load_weights(self, bucket: Sent) -> None:
        """Takes one bucket of new weights."""
        self.worker.load_weights(bucket)

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Completes the weight update; WeightSyncError names a tensor that did not arrive as sent."""
        compare_checksums(checksums, self.worker.finish_weights(version), "the rollout engine")

    def sleep(self) -> None:
        """Frees device memory."""
        self.worker.sleep()

    def wake(self, what: str) -> None:
        """Reclaims device memory."""
        self.worker.wake(what)

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""
        return self.worker.memory()
