"""The critic role: the value function trained alongside the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.platform.algorithms.objectives import value_objective
from tandem.platform.config.schema import CriticConfig, ModelConfig, TrainerConfig
from tandem.platform.experience.batch import LossOutput, RolloutBatch, TrainBatch, Values, real_tokens
from tandem.workers.cluster.runtime import Rank
from tandem.workers.models.loading import load_critic, model_inputs
from tandem.workers.roles.microbatches import infer
from tandem.workers.roles.trained import TrainedWorker


@dataclass(frozen=True)
class CriticSpec:
    """The settings of a critic rank."""

    path: str
    model: ModelConfig
    critic: CriticConfig
    trainer: TrainerConfig
    loss_aggregation: str
    max_response_tokens: int
    max_tokens_per_microbatch: int
    timeout_s: float  # of a collective operation
    seed: int = 0  # of the process's random generators


class CriticWorker(TrainedWorker):
    """One rank of the critic. A single-rank critic implements the `Critic` protocol directly."""

    name = "critic"

    def __init__(self, spec: CriticSpec, rank: Rank) -> None:
        super().__init__(rank, spec.max_tokens_per_microbatch, spec.timeout_s, spec.seed)
        self.spec = spec

    def start(self, address: tuple[str, int] | None = None) -> None:
        """Loads the model and joins the other ranks at `address`; collective."""
        spec = self.spec
        model = load_critic(spec.path, spec.model, spec.critic.head)
        self.backend = self.make_backend(model, spec.critic, spec.trainer, spec.model, address)

    def values(self, batch: RolloutBatch) -> Values:
        """The value before each token, and the value of each whole row."""
        after = infer(self.backend, batch, self.max_tokens, self._values_after)
        final = after.gather(1, (batch.lengths - 1)[:, None]).squeeze(1)
        real = real_tokens(batch.lengths, after.shape[1])
        return Values(torch.where(real, before_token(after), 0.0), final)

    def _values_after(self, forward: Callable[..., Any], batch: RolloutBatch) -> Tensor:
        return values_after(forward, batch)

    def _objective(self, forward: Callable[..., Any], batch: TrainBatch) -> LossOutput:
        return critic_objective(self.spec, forward, batch)


def values_after(forward: Callable[..., Any], batch: RolloutBatch) -> Tensor:
    """(B, T) float32 value after each token."""
    values: Tensor = forward(**model_inputs(batch.tokens, batch.lengths))
    return values


def critic_objective(spec: CriticSpec, forward: Callable[..., Any], batch: TrainBatch) -> LossOutput:
    """The share of one micro-batch, on the model's device, in the value loss of its mini-batch."""
    return value_objective(
        before_token(values_after(forward, batch.rollout)),
        batch,
        value_clip=spec.critic.value_clip,
        aggregation=spec.loss_aggregation,
        max_tokens=spec.max_response_tokens,
    )


def before_token(after: Tensor) -> Tensor:
    """Turns (B, T) values after each token into values before it: `values[b, t]` belongs to the prefix before token t."""
    return pad(after[:, :-1], (1, 0))
