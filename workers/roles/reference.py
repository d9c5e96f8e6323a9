"""The reference role: the frozen initial policy that KL terms compare with. It exists only when a KL term is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.platform.config.schema import ModelConfig
from tandem.platform.experience.batch import RolloutBatch
from tandem.workers.cluster.runtime import Rank, peak_memory_bytes, set_up
from tandem.workers.models.footprint import baseline_bytes, model_bytes
from tandem.workers.models.loading import batch_logprobs, load_policy
from tandem.workers.roles.microbatches import infer_rows


@dataclass(frozen=True)
class ReferenceSpec:
    """The settings of a reference rank."""

    path: str
    model: ModelConfig
    temperature: float
    max_tokens_per_microbatch: int


class ReferenceWorker:
    """One rank of the reference. A single-rank reference implements the `Reference` protocol directly."""

    def __init__(self, spec: ReferenceSpec, rank: Rank) -> None:
        self.spec = spec
        self.device = set_up(rank)

    def start(self) -> None:
        """Loads the model."""
        self.model = load_policy(self.spec.path, self.spec.model).to(self.device).eval().requires_grad_(False)
        self._baseline = baseline_bytes(self.device, held=model_bytes(self.model))

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs of the rows' tokens at the sampling temperature."""
        return infer_rows(self.model, batch, self.device, self.spec.max_tokens_per_microbatch, self._logprobs)

    def offload(self) -> None:
        """Moves the model into host memory."""
        self.model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves the model back to its device."""
        self.model.to(self.device)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind, and the peak of this process."""
        known = {"weights": model_bytes(self.model), "gradients": 0, "optimizer": 0, "baseline": self._baseline}
        return {**known, "peak": peak_memory_bytes(self.device)}

    def _logprobs(self, forward: Callable[..., Any], batch: RolloutBatch) -> Tensor:
        return batch_logprobs(forward, batch, self.spec.temperature)
