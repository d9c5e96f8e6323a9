"""The algorithms as data: what the loop may ask of a record."""

from __future__ import annotations

import torch

from tandem.platform.algorithms import ESTIMATORS, POLICY_LOSSES, resolve
from tandem.platform.config import Config, settings
from tandem.platform.config_algo import AlgoConfig


def test_records() -> None:
    ppo, grpo = resolve("ppo", "gae", "clipped_surrogate"), resolve("grpo", "grpo", "clipped_surrogate")
    assert (ppo.name, ppo.needs_critic, ppo.estimator.min_group) == ("ppo", True, 1)
    assert (grpo.name, grpo.needs_critic, grpo.estimator.min_group) == ("grpo", False, 2)
    assert ppo.objective is grpo.objective is POLICY_LOSSES["clipped_surrogate"]
    assert ppo.estimator is ESTIMATORS["gae"]


def test_the_critic_follows_from_the_estimator_and_not_from_the_name() -> None:
    assert not resolve("ppo", "grpo", "clipped_surrogate").needs_critic
    assert resolve("grpo", "gae", "clipped_surrogate").needs_critic


def test_the_schema_offers_exactly_what_exists() -> None:
    choices = {key: meta["choices"] for key, _, meta in settings(Config()) if meta.get("choices")}
    assert list(choices["adv_estimator"]) == list(ESTIMATORS)
    assert list(choices["algo.policy_loss"]) == list(POLICY_LOSSES)


def test_every_clip_setting_reaches_the_loss() -> None:
    algo = AlgoConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, dual_clip=2.0)
    logprobs, advantages = torch.tensor([[9.0, 0.5, 9.0]]).log(), torch.tensor([[1.0, -1, -1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    losses, clipped = POLICY_LOSSES["clipped_surrogate"].loss(logprobs, torch.zeros(1, 3), advantages, mask, algo)
    assert torch.allclose(losses, torch.tensor([[-1.3, 0.9, 2.0]]))
    assert clipped.all()
