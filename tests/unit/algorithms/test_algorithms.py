"""The algorithms as data: the fields of a record that the loop uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.launch.compose.compose import compose
from tandem.platform.algorithms.registry import ESTIMATORS, POLICY_LOSSES, resolve
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.validate import validate


def test_records() -> None:
    ppo, grpo = resolve("ppo", "gae", "clipped_surrogate"), resolve("grpo", "grpo", "clipped_surrogate")
    assert (ppo.name, ppo.needs_critic, ppo.estimator.min_group) == ("ppo", True, 1)
    assert (grpo.name, grpo.needs_critic, grpo.estimator.min_group) == ("grpo", False, 2)
    assert ppo.objective is grpo.objective is POLICY_LOSSES["clipped_surrogate"]
    assert ppo.estimator is ESTIMATORS["gae"]


def test_the_critic_follows_from_the_estimator_and_not_from_the_name() -> None:
    assert not resolve("ppo", "grpo", "clipped_surrogate").needs_critic
    assert resolve("grpo", "gae", "clipped_surrogate").needs_critic


def test_every_clip_setting_reaches_the_loss() -> None:
    algo = AlgoConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, dual_clip=2.0)
    logprobs, advantages = torch.tensor([[9.0, 0.5, 9.0]]).log(), torch.tensor([[1.0, -1, -1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    losses, clipped = POLICY_LOSSES["clipped_surrogate"].loss(logprobs, torch.zeros(1, 3), advantages, mask, algo)
    assert torch.allclose(losses, torch.tensor([[-1.3, 0.9, 2.0]]))
    assert clipped.all()


OWN = """
from tandem.platform.algorithms.advantages import group_relative, outcomes
from tandem.platform.algorithms.registry import Estimator
from tandem.platform.experience.batch import Credit
from tandem.platform.algorithms.losses import log_likelihood_loss

def doubled(batch, values, algo):
    rewards = outcomes(batch.token_rewards, batch.response_mask)
    found = group_relative(rewards, batch.group_ids, batch.scored, group_std="none")
    return Credit(2 * found[:, None] * batch.response_mask)

pairs = Estimator(doubled, min_group=2)
number = 3

def likelihood(logprobs, old_logprobs, advantages, mask, algo):
    return log_likelihood_loss(logprobs, advantages), mask & False
"""


def test_parts_of_a_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    made = resolve("mine", f"{file}:pairs", f"{file}:likelihood")
    assert (made.needs_critic, made.estimator.min_group, made.objective.reads) == (False, 2, ())
    assert resolve("mine", f"{file}:doubled", "gspo").estimator.min_group == 1  # a plain function does not declare it
    config, given = compose([f"adv_estimator={file}:pairs", f"algo.policy_loss={file}:likelihood"])
    validate(config, given)
    with pytest.raises(ConfigError, match=r"adv_estimator=.*own\.py:pairs compares the samples .* needs at least 2"):
        validate(*compose([f"adv_estimator={file}:pairs", "rollout.samples_per_prompt=1"]))
    with pytest.raises(ConfigError, match=r"algo\.gamma is set, but adv_estimator=.*own\.py:pairs does not read it"):
        validate(*compose([f"adv_estimator={file}:pairs", "algo.gamma=0.9"]))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("own.py:number", "adv_estimator=.*own.py:number is of type int, neither a function nor an Estimator"),
        ("own.py:none", "own.py defines no 'none', which adv_estimator"),
        ("other.py:pairs", "the file of adv_estimator .* does not exist: .*other.py"),
    ],
)
def test_parts_that_are_none_are_refused_by_name(tmp_path: Path, spec: str, said: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=said):
        validate(*compose([f"adv_estimator={tmp_path}/{spec}"]))


def test_a_name_that_is_no_part_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"adv_estimator=grop: not one of .*, nor path\.py:name\. Did you mean grpo\?"):
        validate(*compose(["adv_estimator=grop"]))
