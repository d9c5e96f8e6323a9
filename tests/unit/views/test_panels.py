"""The charts of a run, determined by its settings."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.launch.views.panels import PANELS, panels, still, still_keys

ONE_STEP = {"train.minibatches": 1, "train.epochs_per_batch": 1}
RATIO = {"policy/approx_kl", "policy/clip_frac", "policy/ratio_max"}


def charted(settings: dict[str, Any]) -> set[str]:
    return {key for panel in panels(settings).shown for key in panel.curves.values()}


def test_one_optimizer_step_moves_no_ratio() -> None:
    assert charted({}) - charted(ONE_STEP) == RATIO
    [reason] = panels(ONE_STEP).reasons
    assert reason.startswith("policy/approx_kl, policy/clip_frac, policy/ratio_max. One optimizer step per batch")
    assert "train.minibatches or train.epochs_per_batch" in reason


@pytest.mark.parametrize("more", [{"train.minibatches": 2}, {"train.epochs_per_batch": 2}])
def test_more_steps_do(more: dict[str, int]) -> None:
    assert charted({**ONE_STEP, **more}) >= RATIO
    assert panels({**ONE_STEP, **more}).reasons == []


def test_stale_samples_do_not() -> None:
    """The old log-probs are the trainer's, from before the update, whatever policy sampled."""
    assert not RATIO & charted({**ONE_STEP, "rollout.max_staleness": 2})


def test_what_else_cannot_move() -> None:
    many = {"train.minibatches": 2, "train.epochs_per_batch": 1}
    assert still_keys({**many, "algo.policy_loss": "policy_gradient"}) == {"policy/clip_frac"}
    assert still_keys({"algo.kl_loss_coef": 0.0, "algo.kl_reward_coef": 0.0}) == {"policy/kl", "kl/sampled"}
    assert still_keys({"algo.kl_loss_coef": 0.0, "algo.kl_reward_coef": 0.1}) == frozenset()
    assert charted({"adv_estimator": "gae"}) - charted({"adv_estimator": "grpo"}) == {
        "critic/explained_variance",
        "critic/grad_norm",
    }
    assert still_keys({"rollout.samples_per_prompt": 1}) == {"group/zero_std_frac"}
    assert still_keys({"rollout.max_staleness": 0}) == {"rollout/staleness_mean"}
    assert still_keys({"rollout.max_staleness": 1, "rollout.samples_per_prompt": 2}) == frozenset()


@pytest.mark.parametrize(
    "settings",
    [{}, {"train.minibatches": "x", "train.epochs_per_batch": None}, {"train.minibatches": [], "adv_estimator": ["grpo"]}],
)
def test_settings_that_are_no_numbers_hide_nothing(settings: dict[str, Any]) -> None:
    assert still(settings) == []
    assert charted(settings) == {key for panel in PANELS for key in panel.curves.values()}
