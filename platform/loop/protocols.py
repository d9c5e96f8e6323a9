"""What the driver asks of the roles, whatever runs them: Ray groups, or the workers themselves in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, TrainBatch, Values


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled."""

    samples: int  # per prompt
    temperature: float  # 0 = greedy; log-probs of a greedy sample are those at temperature 1
    max_tokens: int
    seed: tuple[int, ...]  # the same seed, prompt and sample number give the same response
    top_p: float = 1.0  # sample from the most likely tokens of this probability
    top_k: int | None = None  # and from so many at most


@dataclass(frozen=True)
class Totals:
    """Metrics that still add up: sums of numerators and denominators, and maxima."""

    sums: Mapping[str, tuple[float, float]]
    maxima: Mapping[str, float]
    unmoved: frozenset[str] | None = None  # trainable tensors that no update has changed; None: there was no update


ScoreTicket = Any
"""What `Rewards.submit` returned; only the object that made it can read it."""

RolloutTicket = Any
"""What `Rollouts.submit` returned; only the object that made it can read it."""

Bucket = Any
"""A part of the weights between `Actor.weight_buckets` and `Rollouts.load_weights`, as the transport carries it."""


class Role(Protocol):
    """Anything that holds memory."""

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over ranks: weights, gradients, optimizer, activations, cache, baseline, peak."""
        ...


class Resident(Role, Protocol):
    """Anything with a model that can leave its device for a while."""

    def offload(self) -> None:
        """Moves the model, and all that its training holds, into host memory."""
        ...

    def onload(self) -> None:
        """Moves it back."""
        ...


Facts = dict[str, Any]
"""What a rank of a trained role keeps besides tensors, as JSON can hold it."""


class Trained(Resident, Protocol):
    """Anything that learns: its state can be saved, and taken up again on another number of ranks."""

    def state_parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Weights and optimizer, as whole tensors by name, in parts."""
        ...

    def state_facts(self) -> list[Facts]:
        """What every rank keeps besides."""
        ...

    def load_state(self, parts: Iterable[Mapping[str, Tensor]], facts: Sequence[Facts]) -> None:
        """Goes on from what the two gave."""
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
        """How much the gradients of two halves of a batch, each with its own denominators, differ; nothing is moved."""
        ...

    def weight_buckets(self, verify: bool = True) -> Iterator[Bucket]:
        """The weights in parts, each to be passed to `Rollouts.load_weights` as it is; `verify`: with checksums."""
        ...

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of every tensor that `weight_buckets` gave last; nothing if it did not verify."""
        ...


class Reference(Resident, Protocol):
    """The frozen first policy."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32, as `Actor.logprobs`."""
        ...


class Critic(Trained, Protocol):
    """The value function."""

    def values(self, batch: RolloutBatch) -> Values:
        """Value of every prefix."""
        ...

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """One optimizer step per mini-batch, in order."""
        ...


class Rewards(Role, Protocol):
    """Scores responses."""

    @property
    def restarts(self) -> int:
        """Workers that died and have been replaced so far."""
        ...

    def submit(self, rollouts: Sequence[Rollout]) -> ScoreTicket:
        """Starts scoring; returns a ticket for `collect`."""
        ...

    def collect(self, ticket: ScoreTicket) -> list[Score]:
        """One score per rollout of the ticket, in order."""
        ...

    def verify(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order, with what `eval.function` says among its parts."""
        ...


class Rollouts(Role, Protocol):
    """Samples responses."""

    @property
    def restarts(self) -> int:
        """Replicas that died and have been replaced so far."""
        ...

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> RolloutTicket:
        """Starts sampling with the weights of now; returns a ticket for `finished` and `collect`."""
        ...

    def finished(self, ticket: RolloutTicket) -> Iterator[tuple[int, list[Rollout]]]:
        """(place of a prompt, its samples), each as soon as it is there."""
        ...

    def collect(self, ticket: RolloutTicket) -> list[Rollout]:
        """Waits for a ticket: the samples of each prompt side by side, in order of the prompts."""
        ...

    def abandon(self) -> None:
        """Gives up what is being sampled and frees the devices; nothing can be sampled afterwards."""
        ...

    def begin_weights(self) -> None:
        """New weights are about to be sent."""
        ...

    def load_weights(self, bucket: Bucket) -> None:
        """Takes one part of new weights; nothing is sampled until `finish_weights`."""
        ...

    def sleep(self) -> None:
        """Frees the device's memory; nothing may be under way."""
        ...

    def wake(self, what: str) -> None:
        """Takes it back: first for "weights", which may then be loaded, and then for the "cache"."""
        ...

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Declares the weights complete; raises WeightSyncError naming a tensor that did not arrive as sent."""
        ...


class TrainingError(RuntimeError):
    """The optimization cannot go on: a gradient, a loss or a log-prob is not finite."""


class WeightSyncError(RuntimeError):
    """A rollout engine does not hold the weights that the trainer sent."""


@dataclass(frozen=True)
class Roles:
    """The roles of one run. `critic` and `reference` exist only where the algorithm asks for them."""

    actor: Actor
    rewards: Rewards
    rollouts: Rollouts
    critic: Critic | None = None
    reference: Reference | None = None
    devices: float = 1.0  # GPUs that they hold, or CPUs where models are on no GPU
    takes_turns: bool = False  # whether engines and trained models share devices that cannot hold both

    def trained(self) -> dict[str, Trained]:
        """The roles that learn, by name."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    def named(self) -> dict[str, Role]:
        """Role by the name used in metrics and in Ray."""
        roles: dict[str, Role | None] = {
            "actor": self.actor,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.rewards,
            "rollout": self.rollouts,
        }
        return {name: role for name, role in roles.items() if role is not None}
