"""Cross-checks of `algo.*`, `reward.*` and the sampling that they depend on."""

from __future__ import annotations

from typing import Any

import pytest
from test_validate import config, refused

from tandem.platform.planning.validate import validate


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"algo__correction": "truncate", "rollout__top_p": 0.9},
            ["algo.correction=truncate", "rollout.top_p=0.9", "rollout.top_k=null", "Set rollout.top_p=1"],
        ),
        ({"algo__correction": "mask", "rollout__top_k": 5}, ["rollout.top_k=5"]),
        (
            {"algo__dynamic_sampling": True, "rollout__samples_per_prompt": 1},
            ["rollout.samples_per_prompt=1", "=2 or more"],
        ),
        ({"algo__kl_target": 0.1}, ["algo.kl_target=0.1 nats", "algo.kl_reward_coef"]),
        ({"algo__lam_policy": 0.9, "algo__lam_length_alpha": 0.05}, ["algo.lam_policy=0.9", "Set one of them to null"]),
        ({"algo__correction": "mask", "algo__correction_min": 2.0}, ["no weight lies between"]),
        (
            {"reward__overlong_penalty": 1.0, "reward__overlong_buffer_tokens": 33},
            ["reward.overlong_buffer_tokens=33 tokens", "rollout.max_response_tokens=32 tokens"],
        ),
        ({"critic__head": "score"}, ["critic.head=score", "critic.path"]),
        ({"algo__kl_loss_coef": 0.1, "algo__kl_loss_gradient": "k1"}, ["algo.kl_loss_gradient=k1: as a loss"]),
        ({"algo__kl_loss_coef": 0.1, "algo__kl_loss_estimator": "k1"}, ["algo.kl_loss_estimator=k1: as a loss"]),
    ],
)
def test_refused(values: dict[str, Any], words: list[str]) -> None:
    text = refused(**values)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "values",
    [
        {"algo__correction": "truncate", "rollout__temperature": 0.7},  # every log-prob uses the temperature
        {"algo__kl_loss_coef": 0.1, "algo__kl_loss_estimator": "k1", "algo__kl_loss_gradient": "k2"},
        {"algo__kl_reward_coef": 0.1, "algo__kl_target": 0.1},
        {"reward__overlong_penalty": 1.0, "reward__overlong_buffer_tokens": 32},
        {"reward__overlong_buffer_tokens": 33},  # the penalty is off
        {"adv_estimator": "grpo", "critic__head": "score"},
    ],
)
def test_accepted(values: dict[str, Any]) -> None:
    assert validate(config(**values)) == []


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("algo.lam_policy", {"adv_estimator": "rloo"}),
        ("algo.group_std", {"adv_estimator": "dr_grpo"}),
        ("algo.gamma", {"adv_estimator": "remax"}),
        ("critic.head", {"adv_estimator": "opo"}),
        ("algo.clip_ratio_high", {"algo__policy_loss": "policy_gradient"}),
        ("algo.dual_clip", {"algo__policy_loss": "cispo"}),
    ],
)
def test_a_setting_that_the_chosen_part_does_not_read_is_refused(given: str, values: dict[str, Any]) -> None:
    assert f"{given} is set, but" in refused(given, **values)


@pytest.mark.parametrize(
    ("given", "switch"),
    [
        ("algo.kl_reward_estimator", "algo.kl_reward_coef"),
        ("algo.kl_horizon", "algo.kl_target"),
        ("algo.kl_loss_gradient", "algo.kl_loss_coef"),
        ("algo.correction_level", "algo.correction"),
        ("algo.correction_min", "algo.correction=mask"),
        ("algo.dynamic_at_cap", "algo.dynamic_sampling"),
        ("algo.positive_above", "algo.positive_nll_coef"),
        ("reward.function_weight", "reward.function"),
        ("reward.model_weight", "reward.model"),
        ("reward.overlong_buffer_tokens", "reward.overlong_penalty"),
        ("critic.warmup_until", "critic.warmup_steps"),
    ],
)
def test_a_setting_of_what_is_off_is_warned_of(given: str, switch: str) -> None:
    assert validate(config(), [given]) == [f"{given} is set, but {switch} is off"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rollout__top_p": 0.9}, "truncate the sampling distribution"),
        ({"rollout__max_staleness": 1}, "Set algo.correction=truncate"),
        ({"adv_estimator": "opo", "train__minibatches": 2}, "adv_estimator=opo is meant for one"),
        ({"algo__policy_loss": "policy_gradient", "train__epochs_per_batch": 2}, "policy_gradient is meant for one"),
        ({"algo__dynamic_sampling": True, "algo__dynamic_surplus": "keep"}, "Set algo.correction=truncate"),
        ({"adv_estimator": "grpo_process", "reward__clip": 1.0}, "reward.clip=1.0 changes the reward of a whole response"),
        ({"adv_estimator": "grpo_process", "reward__normalize": "mean_std"}, "lands on its last step"),
        ({"algo__kl_stop": 0.1}, "with train.epochs_per_batch=1"),
        ({"reward__overlong_penalty": 1.0, "reward__overlong_buffer_tokens": 0}, "has no effect"),
        ({"reward__overlong_penalty": 1.0, "rollout__max_response_tokens": 4}, "rollout.max_response_tokens=4 tokens"),
    ],
)
def test_warned_of(values: dict[str, Any], words: str) -> None:
    [warning] = validate(config(**values))
    assert words in warning


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline", "grpo"])
def test_whitening_that_belongs_to_the_estimator_cannot_be_turned_off(estimator: str) -> None:
    warnings = validate(config(adv_estimator=estimator, algo__whiten_advantages=False), ["algo.whiten_advantages"])
    assert [f"adv_estimator={estimator} whitens" in warning for warning in warnings] == [True] * (estimator != "grpo")
