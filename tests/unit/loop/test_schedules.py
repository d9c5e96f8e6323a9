"""Learning-rate schedules, compared with hand-worked values and with transformers, and at their ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import Config, ConfigError, OptimizerConfig
from tandem.platform.loop.schedules import rate_factor, with_total_steps


def factors(count: int, **settings: object) -> list[float]:
    factor = rate_factor(OptimizerConfig(**settings))  # type: ignore[arg-type]
    return [factor(step) for step in range(count)]


def test_by_hand() -> None:
    warm = {"lr_warmup_steps": 2, "lr_total_steps": 6}
    assert factors(4, lr_warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors(3) == [1.0, 1.0, 1.0]
    assert factors(8, **warm, lr_schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors(8, **warm, lr_schedule="linear", lr_min_ratio=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    half = 0.5 + 0.5 * 0.5**0.5
    assert factors(8, **warm, lr_schedule="cosine") == pytest.approx([0.5, 1, 1, half, 0.5, 1 - half, 0, 0], abs=1e-12)
    stable = {"lr_schedule": "wsd", "lr_total_steps": 10, "lr_decay_fraction": 0.4, "lr_min_ratio": 0.1}
    assert factors(11, **stable) == pytest.approx([1] * 7 + [0.775, 0.55, 0.325, 0.1])
    assert factors(4, lr_schedule="wsd", lr_total_steps=4, lr_decay_fraction=1.0) == factors(
        4, lr_schedule="linear", lr_total_steps=4
    )


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_after_the_warm_up_it_is_that_of_transformers(kind: str) -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup, total = 7, 40
    theirs = {
        "linear": lambda: get_linear_schedule_with_warmup(adam, warmup, total),
        "cosine": lambda: get_cosine_schedule_with_warmup(adam, warmup, total),
        "wsd": lambda: get_wsd_schedule(
            adam, num_warmup_steps=warmup, num_decay_steps=11, num_training_steps=total, decay_type="linear"
        ),
    }[kind]().lr_lambdas[0]
    ours = factors(50, lr_schedule=kind, lr_warmup_steps=warmup, lr_total_steps=total, lr_decay_fraction=11 / 33)
    assert ours[warmup:total] == pytest.approx([theirs(step) for step in range(warmup, total)], abs=1e-9)


def scheduled(*overrides: str, steps: int = 10, has_critic: bool = True) -> Config:
    config, _ = compose([*overrides, "actor.lr_schedule=linear", "critic.lr_schedule=cosine"])
    return with_total_steps(config, steps, has_critic)


def test_the_run_s_optimizer_steps_are_counted() -> None:
    config = scheduled("train.epochs_per_batch=2", "train.minibatches=4", "critic.warmup_steps=3")
    assert (config.actor.lr_total_steps, config.critic.lr_total_steps) == (56, 80)
    config = scheduled("critic.warmup_steps=3", has_critic=False)
    assert config.actor.lr_total_steps == 10
    config = scheduled("actor.lr_total_steps=99")
    assert (config.actor.lr_total_steps, config.critic.lr_total_steps) == (99, 10)


def test_a_run_that_is_over_before_its_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.lr_warmup_steps=10 takes all 10 optimizer steps"):
        scheduled("actor.lr_warmup_steps=10")
    config = scheduled("actor.lr_warmup_steps=9")
    assert rate_factor(replace(config.actor))(9) == 1.0
