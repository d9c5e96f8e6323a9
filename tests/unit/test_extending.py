"""The steps in CONTRIBUTING.md are sufficient to add an estimator, an objective or a reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from unit_batches import batch_of

from tandem.launch.compose.compose import compose
from tandem.launch.settings import settings_table
from tandem.platform.algorithms.registry import ESTIMATORS, POLICY_LOSSES, Estimator, Objective, algorithm_of
from tandem.platform.experience.batch import Credit
from tandem.platform.planning.validate import validate
from tandem.platform.rewards.functions import REWARDS, Sample, resolve


def constant(batch: Any, values: Any, algo: Any) -> Credit:
    return Credit(2.0 * batch.response_mask)


def likelihood(logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any, algo: Any) -> Any:
    return -logprobs * advantages, mask & False


def test_an_estimator_outside_the_repository(tmp_path: Path) -> None:
    """An estimator needs one file and a setting that names it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from tandem.platform.experience.batch import Credit\n"
        "def constant(batch, values, algo):\n    return Credit(2.0 * batch.response_mask)\n"
    )
    config, given = compose([f"adv_estimator={file}:constant"])
    assert not validate(config, given)
    batch = batch_of(torch.tensor([[True, False], [True, True]]))
    credit = algorithm_of(config).estimator.advantages(batch, None, config.algo)
    assert torch.equal(credit.advantages, 2.0 * batch.response_mask)


def test_an_estimator_and_an_objective_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs a function, a line in the registry and a file in conf/algo, and nothing else."""
    monkeypatch.setitem(ESTIMATORS, "constant", Estimator(constant, min_group=2))
    monkeypatch.setitem(POLICY_LOSSES, "likelihood", Objective(likelihood))
    config, given = compose(["adv_estimator=constant", "algo.policy_loss=likelihood"])
    assert not validate(config, given)
    made = algorithm_of(config)
    assert (made.estimator.advantages, made.objective.loss, made.needs_critic) == (constant, likelihood, False)
    table = settings_table(["estimator", "critic"])
    assert "| constant]" in " ".join(table.split())


def test_a_reward_inside_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward needs a function and a line in the registry."""

    def short(sample: Sample) -> float:
        return 1.0 / (1 + len(sample.response))

    monkeypatch.setitem(REWARDS, "short", short)
    config, given = compose(["reward.functions.short=0.5"])
    validate(config, given)
    assert config.reward.functions == {"short": 0.5}
    assert resolve("short") == ("short", short)


def test_the_guide_names_files_that_exist(repo: Path) -> None:
    guide = (repo / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:platform|workers|launch|conf|tests|benchmarks)/[\w/]+\.(?:py|md|yaml))`", guide))
    assert len(named) > 20
    assert [file for file in sorted(named) if not (repo / file).exists()] == []
