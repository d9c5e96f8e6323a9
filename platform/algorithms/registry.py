"""The algorithms, as data.

An algorithm is a record of an advantage estimator and a policy objective. Its numbers are in `conf/algo/*.yaml`. No other
code names an algorithm: the loop asks the record what it needs. Users select their own parts with
`adv_estimator=path.py:name` and `algo.policy_loss=path.py:name`. To add a built-in part, write a pure function in
`advantages.py` or `losses.py`, and add a line to a dict below and a YAML file with its numbers.
`ALGORITHMS.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from tandem.platform.algorithms import advantages as estimate
from tandem.platform.algorithms import losses
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.experience.batch import Credit, RolloutBatch, Values
from tandem.platform.system.user_code import load_attribute

Advantages = Callable[[RolloutBatch, Values | None, AlgoConfig], Credit]
"""(samples with their final token rewards, values if there is a critic, settings) -> credit."""

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, AlgoConfig], tuple[Tensor, Tensor]]
"""(log-probs, old log-probs, advantages, mask, all (B, T), settings) -> loss per token, whether a clip determined it."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator and its requirements."""

    advantages: Advantages
    needs_critic: bool = False
    needs_greedy: bool = False  # reads the reward of a greedy response to each prompt
    rewards_steps: bool = False  # reads where the steps of a response end
    min_group: int = 1  # fewest samples per prompt
    one_update: bool = False  # assumes on-policy samples: one optimizer step per batch
    whitens: bool = False  # over the tokens of the batch, as part of its definition
    reads: tuple[str, ...] = ()  # settings that only some estimators read; an error if set for any other estimator


@dataclass(frozen=True)
class Objective:
    """A policy objective and its requirements."""

    loss: PolicyLoss
    one_update: bool = False  # as in `Estimator`
    reads: tuple[str, ...] = ()  # settings that only some objectives read


@dataclass(frozen=True)
class Algorithm:
    """What the loop needs to know about an algorithm."""

    name: str
    estimator: Estimator
    objective: Objective

    @property
    def needs_critic(self) -> bool:
        """Whether a critic exists; the estimator alone determines this."""
        return self.estimator.needs_critic


def _gae(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    assert values is not None, "gae reads values"
    mask = batch.response_mask
    bootstrapped = batch.truncated if algo.bootstrap_truncated else torch.zeros_like(batch.truncated)
    final = torch.where(bootstrapped, values.final, torch.zeros_like(values.final))

    def estimated(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        return estimate.gae(batch.token_rewards, values.values, mask, final, gamma=algo.gamma, lam=lam)

    advantages, returns = estimated(algo.lam)
    if algo.lam_length_alpha is not None:
        advantages, _ = estimated(estimate.length_adaptive_lambda(mask, algo.lam_length_alpha))
    elif algo.lam_policy is not None:
        advantages, _ = estimated(algo.lam_policy)
    return Credit(advantages, returns)


def _group_relative(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    advantages = estimate.group_relative(_outcomes(batch), batch.group_ids, batch.scored, group_std=algo.group_std)
    return _to_tokens(advantages, batch)


def _group_centred(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    advantages = estimate.group_relative(_outcomes(batch), batch.group_ids, batch.scored, group_std="none")
    return _to_tokens(advantages, batch)


def _process_relative(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    ends, mask, groups = batch.step_ends, batch.response_mask, batch.group_ids
    std = algo.group_std
    return Credit(estimate.process_relative(batch.token_rewards, ends, mask, groups, batch.scored, group_std=std))


def _leave_one_out(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    return _to_tokens(estimate.leave_one_out(_outcomes(batch), batch.group_ids, batch.scored), batch)


def _batch_relative(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    return _to_tokens(estimate.batch_relative(_outcomes(batch), batch.scored), batch)


def _rewards_to_go(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    return Credit(estimate.rewards_to_go(batch.token_rewards, batch.response_mask, gamma=algo.gamma))


def _against_greedy(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    return _to_tokens(estimate.against_greedy(_outcomes(batch), batch.baselines, batch.scored), batch)


def _length_weighted(batch: RolloutBatch, values: Values | None, algo: AlgoConfig) -> Credit:
    lengths = batch.response_mask.sum(dim=1)
    return _to_tokens(estimate.length_weighted(_outcomes(batch), lengths, batch.group_ids, batch.scored), batch)


def _outcomes(batch: RolloutBatch) -> Tensor:
    return estimate.outcomes(batch.token_rewards, batch.response_mask)


def _to_tokens(advantages: Tensor, batch: RolloutBatch) -> Credit:
    """Gives every token the advantage of its response."""
    return Credit(torch.where(batch.response_mask, advantages[:, None], 0.0))


def _clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    return _surrogate(losses.importance_ratio(logprobs, old_logprobs, mask), advantages, algo)


def _gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    return _surrogate(losses.sequence_ratio(logprobs, old_logprobs, mask), advantages, algo)


def _surrogate(ratio: Tensor, advantages: Tensor, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    low, high = algo.clip_ratio_low, algo.clip_ratio_high
    return losses.clipped_surrogate(ratio, advantages, clip_low=low, clip_high=high, dual_clip=algo.dual_clip)


def _cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    ratio = losses.importance_ratio(logprobs, old_logprobs, mask)
    low, high = algo.clip_ratio_low, algo.clip_ratio_high
    return losses.clipped_weight(logprobs, ratio, advantages, clip_low=low, clip_high=high)


def _policy_gradient(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    return losses.log_likelihood_loss(logprobs, advantages), torch.zeros_like(mask)


GAMMA, GROUP_STD = "algo.gamma", "algo.group_std"
LAMBDAS = ("algo.lam", "algo.lam_policy", "algo.lam_length_alpha")

ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(_gae, needs_critic=True, reads=(GAMMA, *LAMBDAS, "algo.bootstrap_truncated")),
    "grpo": Estimator(_group_relative, min_group=2, reads=(GROUP_STD,)),
    "dr_grpo": Estimator(_group_centred, min_group=2),
    "grpo_process": Estimator(_process_relative, rewards_steps=True, min_group=2, reads=(GROUP_STD,)),
    "rloo": Estimator(_leave_one_out, min_group=2),
    "reinforce": Estimator(_batch_relative),
    "reinforce_pp": Estimator(_rewards_to_go, whitens=True, reads=(GAMMA,)),
    "reinforce_pp_baseline": Estimator(_group_centred, min_group=2, whitens=True),
    "remax": Estimator(_against_greedy, needs_greedy=True),
    "opo": Estimator(_length_weighted, min_group=2, one_update=True),
}
"""Estimators by the name used in `adv_estimator`."""

CLIPS = ("algo.clip_ratio_low", "algo.clip_ratio_high")

POLICY_LOSSES: dict[str, Objective] = {
    "clipped_surrogate": Objective(_clipped_surrogate, reads=(*CLIPS, "algo.dual_clip")),
    "gspo": Objective(_gspo, reads=(*CLIPS, "algo.dual_clip")),
    "cispo": Objective(_cispo, reads=CLIPS),
    "policy_gradient": Objective(_policy_gradient, one_update=True),
}
"""Objectives by the name used in `algo.policy_loss`."""


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm that the settings select.

    Raises:
        ConfigError: a part is neither built in nor found as `path.py:name`.
    """
    return resolve(config.algo.name, config.adv_estimator, config.algo.policy_loss)


def resolve(name: str, adv_estimator: str, policy_loss: str) -> Algorithm:
    """The record of an algorithm called `name`, from the parts chosen in the configuration.

    Raises:
        ConfigError: a part is neither built in nor found as `path.py:name`.
    """
    return Algorithm(name, estimator_of(adv_estimator), objective_of(policy_loss))


def estimator_of(spec: str) -> Estimator:
    """A built-in estimator, or one from a user's file: an `Estimator`, or a function of type `Advantages`.

    Raises:
        ConfigError: no such estimator exists.
    """
    return ESTIMATORS[spec] if spec in ESTIMATORS else _own(spec, "adv_estimator", Estimator)


def objective_of(spec: str) -> Objective:
    """A built-in objective, or one from a user's file: an `Objective`, or a function of type `PolicyLoss`.

    Raises:
        ConfigError: no such objective exists.
    """
    return POLICY_LOSSES[spec] if spec in POLICY_LOSSES else _own(spec, "algo.policy_loss", Objective)


Part = TypeVar("Part", Estimator, Objective)


@lru_cache(maxsize=16)
def _own(spec: str, setting: str, kind: type[Part]) -> Part:
    part = load_attribute(spec, setting, ConfigError)
    if isinstance(part, kind):
        return part
    if not callable(part):
        raise ConfigError(f"{setting}={spec} is of type {type(part).__name__}, neither a function nor an {kind.__name__}")
    return kind(part)
