"""The common base of actor and critic: a model in a training backend, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from tandem.platform.config.schema import ConfigError, ModelConfig, OptimizerConfig, TrainerConfig
from tandem.platform.experience.batch import LossOutput, TrainBatch
from tandem.platform.loop.metrics import add_totals
from tandem.platform.loop.protocols import Facts, Totals
from tandem.platform.loop.seeds import mix
from tandem.workers.cluster.runtime import Rank, Rendezvous, own_interface, peak_memory_bytes, set_up
from tandem.workers.models.determinism import check_passes
from tandem.workers.roles.microbatches import training_parts
from tandem.workers.sync.transports import ObjectStore, Packed
from tandem.workers.training.backend import TrainerBackend
from tandem.workers.training.deepspeed import DeepSpeedBackend
from tandem.workers.training.random_states import random_states, seed_random, set_random_states

BACKENDS: dict[str, Any] = {"deepspeed": DeepSpeedBackend}
"""Training backends by their name in `trainer.name`."""


class TrainedWorker:
    """A rank of a trained role; the subclass defines the objective.

    `max_tokens` limits the tokens of a micro-batch, padding included; `timeout_s` limits a collective operation. The random
    generators of the process are seeded from `seed` and the rank.
    """

    name: ClassVar[str]
    backend: TrainerBackend

    def __init__(self, rank: Rank, max_tokens: int, timeout_s: float, seed: int = 0) -> None:
        self.rank, self.max_tokens, self.timeout_s = rank, max_tokens, timeout_s
        self.device = set_up(rank)
        seed_random(mix(seed, rank.index))
        self._rendezvous = Rendezvous(rank.world_size, timeout_s) if rank.index == 0 else None

    def address(self) -> tuple[str, int]:
        """(host, port) where the ranks of this role meet; only rank 0 has it."""
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
        """Wraps the model in the training backend; collective over the ranks of the role.

        Raises:
            ConfigError: passes over the same tokens differ, or a parameter has no dimensions; names the modules.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dim() == 0:
                raise ConfigError(
                    f"the model of the {self.name}: parameter {name} is a single number without dimensions, which "
                    "DeepSpeed cannot train. Give it the shape (1,) in the model's code and weights"
                )
        check_passes(getattr(model, "body", model).to(self.device), self.device, f"the model of the {self.name}")
        meeting = (address or self.address(), self._rendezvous, self.timeout_s)
        with own_interface():
            return BACKENDS[trainer.name](model, self.name, optimizer, trainer, config, self.rank, self.device, meeting)

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """Takes one optimizer step per mini-batch; `minibatches` holds this rank's part of each."""
        return add_totals(
            self.backend.step(training_parts(self.backend, part, self.max_tokens), self._objective) for part in minibatches
        )

    def _objective(self, forward: Callable[..., Any], batch: TrainBatch) -> LossOutput:
        """The share of one micro-batch in the role's loss of its mini-batch."""
        raise NotImplementedError

    def offload(self) -> None:
        """Moves the model and its training state to host memory."""
        self.backend.offload()

    def onload(self) -> None:
        """Moves the model and its training state back to the device."""
        self.backend.onload()

    def state_parts(self) -> Iterator[dict[str, Tensor]]:
        """Yields weights and optimizer moments in parts of whole tensors, which are empty except on rank 0. Collective."""
        return self.backend.state_parts()

    def begin_state(self) -> int:
        """Resets `next_state` to the first part; returns the number of parts."""
        self._parts = self.state_parts()
        return self.backend.state_part_count()

    def next_state(self) -> Packed | None:
        """The next part, packed for sending; None except on rank 0."""
        part = next(self._parts)
        return ObjectStore().send(part) if part else None

    def state_facts(self) -> list[Facts]:
        """This rank's entry in the list by rank: optimizer steps so far, and the states of its random generators."""
        return [{"updates": self.backend.updates(), "random": random_states()}]

    def begin_load(self, facts: Sequence[Facts]) -> None:
        """Prepares to load a state; `facts` has an entry per rank that saved it."""
        self._facts = facts
        self.backend.begin_load(facts[0]["updates"])

    def load_part(self, part: Packed | Mapping[str, Tensor]) -> None:
        """Loads one part; collective."""
        self.backend.load_part(part.unpack() if isinstance(part, Packed) else part)

    def end_load(self) -> None:
        """Finishes loading. A rank that did not exist when the state was saved keeps its own random generators."""
        self.backend.end_load(self._facts[0]["updates"])
        if self.rank.index < len(self._facts):
            set_random_states(self._facts[self.rank.index]["random"])

    def load_state(self, parts: Iterable[Mapping[str, Tensor]], facts: Sequence[Facts]) -> None:
        """Loads the output of `state_parts` and `state_facts`; for a single rank."""
        self.begin_load(facts)
        for part in parts:
            self.load_part(part)
        self.end_load()

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind, and the peak of this process."""
        return {**self.backend.memory(), "peak": peak_memory_bytes(self.device)}
