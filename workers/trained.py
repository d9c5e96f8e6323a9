"""What the actor and the critic have in common: a model in a training backend, on one rank."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from tandem.platform.config import ModelConfig, OptimizerConfig, TrainerConfig
from tandem.workers.runtime import Rank, Rendezvous, peak_memory_bytes, set_up
from tandem.workers.trainer import DeepSpeedBackend, TrainerBackend

BACKENDS: dict[str, Any] = {"deepspeed": DeepSpeedBackend}
"""By the name used in `trainer.name`."""


class TrainedWorker:
    """A rank of a role that learns."""

    name: ClassVar[str]
    backend: TrainerBackend

    def __init__(self, rank: Rank, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.device = set_up(rank)
        self._rendezvous = Rendezvous(rank.world_size, timeout_s) if rank.index == 0 else None

    def address(self) -> tuple[str, int]:
        """(host, port) where the ranks of this role meet; asked of rank 0."""
        assert self._rendezvous is not None, "only rank 0 has the address"
        return self._rendezvous.address

    def make_backend(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        config: ModelConfig,
        address: tuple[str, int] | None,
    ) -> TrainerBackend:
        """The model under training; collective over the ranks of the role."""
        meeting = (address or self.address(), self._rendezvous, self.timeout_s)
        return BACKENDS[trainer.name](model, self.name, optimizer, trainer, config, self.rank, self.device, meeting)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind, and the peak of its process."""
        return {**self.backend.memory(), "peak": peak_memory_bytes(self.device)}
