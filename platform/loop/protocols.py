"""Protocols of the roles that the driver calls. Ray groups implement them, and so do the in-process workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, TrainBatch, Values


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request."""

    samples: int  # per prompt
    temperature: float  # 0 = greedy; the log-probs of a greedy sample are taken at temperature 1
    max_tokens: int
    seed: tuple[int, ...]  # the same seed, prompt and sample number give the same response
    top_p: float = 1.0  # sample from the most likely tokens of this probability
    top_k: int | None = None  # sample from at most this many most likely tokens


@dataclass(frozen=True)
class Totals:
    """Metrics before division, which can still be added up: sums of numerators and denominators, and maxima."""

    sums: Mapping[str, tuple[float, float]]
    maxima: Mapping[str, float]
    unmoved: frozenset[str] | None = None  # trainable tensors that no update has changed; None: no update was made


ScoreTicket = Any
"""What `Rewards.submit` returned; only the object that made it can read it."""

RolloutTicket = Any
"""What `Rollouts.submit` returned; only the object that made it can read it."""

Bucket = Any
"""A part of the weights between `Actor.weight_buckets` and `Rollouts.load_weights`, as the transport carries it."""


class Role(Protocol):
    """A role that reports its memory."""

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over ranks: weights, gradients, optimizer, activations, cache, baseline, peak."""
        ...


class Resident(Role, Protocol):
    """A role whose model can be moved off its device."""

    def offload(self) -> None:
        """Moves the model and its training state into host memory."""
        ...

    def onload(self) -> None:
        """Moves the model and its training state back to the device."""
        ...


Facts = dict[str, Any]
"""The state of a rank of a trained role, apart from tensors, as JSON values."""


class Trained(Resident, Protocol):
    """A role that learns. Its state can be saved, and loaded on a different number of ranks."""

    def state_parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Weights and optimizer, as whole tensors by name, in parts."""
        ...

    def state_facts(self) -> list[Facts]:
        """The facts of every rank."""
        ...

    def load_state(self, parts: Iterable[Mapping[str, Tensor]], facts: Sequence[Facts]) -> None:
        """Loads the results of `state_parts` and `state_facts`."""
        ...


class Actor(Trained, Protocol):
    """The policy that is trained."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs of the sampled tokens at the sampling temperature."""
        ...

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """One optimizer step per mini-batch, in order."""
        ...

    def gradient_noise(self, halves: Sequence[TrainBatch]) -> Totals:
        """How much the gradients of two halves of a batch differ, each with its own denominators. Changes no weights."""
        ...

    def weight_buckets(self, verify: bool = True) -> Iterator[Bucket]:
        """The weights in buckets. Pass each bucket unchanged to `Rollouts.load_weights`. `verify`: compute checksums."""
        ...

    def weight_checksums(self) -> dict[str, int]:
        """Checksums by tensor name from the last `weight_buckets`; empty if `verify` was False."""
        ...


class Reference(Resident, Protocol):
    """The frozen initial policy."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs, as in `Actor.logprobs`."""
        ...


class Critic(Trained, Protocol):
    """The value function."""

    def values(self, batch: RolloutBatch) -> Values:
        """The value of every prefix."""
        ...

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """One optimizer step per mini-batch, in order."""
        ...


class Rewards(Role, Protocol):
    """Scores responses."""

    @property
    def restarts(self) -> int:
        """Number of workers that have died and been replaced."""
        ...

    def submit(self, rollouts: Sequence[Rollout]) -> ScoreTicket:
        """Starts scoring; returns a ticket for `collect`."""
        ...

    def collect(self, ticket: ScoreTicket) -> list[Score]:
        """One score per rollout of the ticket, in order."""
        ...

    def verify(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order; its parts include the value of `eval.function`."""
        ...


class Rollouts(Role, Protocol):
    """Samples responses."""

    @property
    def restarts(self) -> int:
        """Number of replicas that have died and been replaced."""
        ...

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> RolloutTicket:
        """Starts sampling with the current weights; returns a ticket for `finished` and `collect`."""
        ...

    def finished(self, ticket: RolloutTicket) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields (position of a prompt, its samples) as soon as the samples of each prompt are complete."""
        ...

    def collect(self, ticket: RolloutTicket) -> list[Rollout]:
        """Waits for a ticket. Returns the samples in the order of the prompts; those of one prompt are adjacent."""
        ...

    def abandon(self) -> None:
        """Aborts sampling and frees the devices. The engines cannot sample afterwards."""
        ...

    def begin_weights(self) -> None:
        """Announces that new weights will be sent."""
        ...

    def load_weights(self, bucket: Bucket) -> None:
        """Loads one bucket of new weights. No sampling is possible until `finish_weights`."""
        ...

    def sleep(self) -> None:
        """Frees the device memory. No sampling may be in progress."""
        ...

    def wake(self, what: str) -> None:
        """Allocates device memory again: first for "weights", which can then be loaded, then for the "cache"."""
        ...

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Declares the weights complete. Raises WeightSyncError with the name of a tensor whose checksum differs."""
        ...


class TrainingError(RuntimeError):
    """Training cannot continue: a gradient, a loss or a log-prob is not finite."""


class WeightSyncError(RuntimeError):
    """A rollout engine does not hold the weights that the trainer sent."""


@dataclass(frozen=True)
class Roles:
    """The roles of one run. `critic` and `reference` exist only if the algorithm needs them."""

    actor: Actor
    rewards: Rewards
    rollouts: Rollouts
    critic: Critic | None = None
    reference: Reference | None = None
    devices: float = 1.0  # number of GPUs that the roles hold, or of CPUs if no model is on a GPU
    takes_turns: bool = False  # whether engines and trained models share devices that cannot hold both

    def trained(self) -> dict[str, Trained]:
        """The roles that learn, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def named(self) -> dict[str, Role]:
        """All roles, by the name used in metrics and in Ray."""
        roles: dict[str, Role | None] = {
            "actor": self.actor,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.rewards,
            "rollout": self.rollouts,
        }
        return {name: role for name, role in roles.items() if role is not None}
