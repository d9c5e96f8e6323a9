"""The algorithms, as data.

An algorithm is a record: which estimator gives its advantages and which objective its policy follows. Numbers live in
`conf/algo/*.yaml`. To add one: write the estimator or the loss as a pure function in `advantages.py` or `losses.py`, add a
line to the dict below, and a YAML file with its numbers. Nothing else mentions it: the loop asks the record what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.platform.advantages import gae, group_relative, outcomes
from tandem.platform.batch import Credit, RolloutBatch, Values
from tandem.platform.config import AlgoConfig
from tandem.platform.losses import clipped_surrogate

Advantages = Callable[[RolloutBatch, Values | None, AlgoConfig], Credit]
"""(samples with their final token rewards, values if there is a critic, numbers) -> credit."""

PolicyLoss = Callable[[Tensor, Tensor, AlgoConfig], tuple[Tensor, Tensor]]
"""(ratio (B, T), advantages (B, T), numbers) -> loss per token, whether the clip decided it; both (B, T)."""


@dataclass(frozen=True)
class Estimator:
    """How advantages are estimated, and what that takes."""

    advantages: Advantages
    needs_critic: bool
    min_group: int  # fewest samples per prompt it can work with
    reads: tuple[str, ...]  # settings that only some estimators read; setting another's by hand is an error


@dataclass(frozen=True)
class Algorithm:
    """What the loop needs to know of an algorithm."""

    name: str
    needs_critic: bool
    min_group: int
    advantages: Advantages
    policy_loss: PolicyLoss


def _gae(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    assert values is not None, "gae reads values"
    bootstrapped = batch.truncated if algo.bootstrap_truncated else torch.zeros_like(batch.truncated)
    final = torch.where(bootstrapped, values.final, torch.zeros_like(values.final))
    advantages, returns = gae(
        batch.token_rewards, values.values, batch.response_mask, final, gamma=algo.gamma, lam=algo.lam
    )
    return Credit(advantages, returns)


def _group_relative(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    scores = outcomes(batch.token_rewards, batch.response_mask)
    advantages = group_relative(scores, batch.group_ids, batch.scored, group_std=algo.group_std)
    return Credit(torch.where(batch.response_mask, advantages[:, None], 0.0))


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    low, high = algo.clip_ratio_low, algo.clip_ratio_high
    return clipped_surrogate(ratio, advantages, clip_low=low, clip_high=high, dual_clip=algo.dual_clip)


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(_gae, needs_critic=True, min_group=1, reads=("algo.gamma", "algo.lam", "algo.bootstrap_truncated")),
    "grpo": Estimator(_group_relative, needs_critic=False, min_group=2, reads=("algo.group_std",)),
}
"""By the name used in `adv_estimator`."""

POLICY_LOSSES: dict[str, PolicyLoss] = {"clipped_surrogate": _clipped_surrogate}
"""By the name used in `algo.policy_loss`."""


def resolve(name: str, adv_estimator: str, policy_loss: str) -> Algorithm:
    """The record of an algorithm called `name`, from the parts chosen in the configuration."""
    estimator = ESTIMATORS[adv_estimator]
    return Algorithm(name, estimator.needs_critic, estimator.min_group, estimator.advantages, POLICY_LOSSES[policy_loss])
