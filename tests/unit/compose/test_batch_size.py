"""The batch is stated in samples; how many of them share a prompt follows from the estimator."""

from __future__ import annotations

import pytest

from tandem.launch.compose.compose import compose, config_groups
from tandem.platform.algorithms.registry import ESTIMATORS
from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.validate import validate


@pytest.mark.parametrize(
    ("overrides", "prompts", "group"),
    [
        (["algo=ppo"], 256, 1),
        (["algo=grpo"], 32, 8),
        (["adv_estimator=grpo"], 32, 8),
        (["algo=grpo", "adv_estimator=gae"], 256, 1),
        (["algo=reinforce_pp"], 256, 1),
        (["algo=vapo"], 32, 8),  # as in its paper
        (["algo=grpo", "rollout.samples_per_prompt=auto"], 32, 8),
        (["algo=vapo", "rollout.samples_per_prompt=auto"], 256, 1),
        (["algo=ppo", "rollout.samples_per_prompt=4"], 64, 4),
        (["algo=grpo", "data.samples_per_step=64"], 8, 8),
        (["algo=ppo", "data.prompts_per_step=4"], 4, 1),
        (["algo=grpo", "data.prompts_per_step=4"], 4, 8),
        (["algo=ppo", "algo.dynamic_sampling=true"], 32, 8),
    ],
)
def test_prompts_and_group(overrides: list[str], prompts: int, group: int) -> None:
    config, given = compose(overrides)
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (prompts, group)
    assert (config.prompts_per_step, config.group, config.samples_per_step) == (prompts, group, prompts * group)
    validate(config, given)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_alone_gets_a_group_it_can_use(estimator: str) -> None:
    config, given = compose([f"adv_estimator={estimator}"])
    validate(config, given)
    assert config.samples_per_step == 256


@pytest.mark.parametrize("algo", config_groups()["algo"])
def test_every_algorithm_trains_on_as_many_samples(algo: str) -> None:
    assert compose([f"algo={algo}"])[0].samples_per_step == 256


@pytest.mark.parametrize(("samples", "nearest"), [(100, 96), (7, 8)])
def test_samples_that_no_groups_add_up_to(samples: int, nearest: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"samples_per_step={samples} is not a multiple .* data.samples_per_step={nearest}"
    ):
        compose(["algo=grpo", f"data.samples_per_step={samples}"])
