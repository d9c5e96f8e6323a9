"""The benchmark's arms and controls, and the folder of its runs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.benchmarks.ab.arms import Arm, Plan, check_controls, load_plan, make_arms
from tandem.benchmarks.ab.runs import Run, order, run_all
from tandem.launch.storage.claim import claimed
from tandem.platform.config.schema import ConfigError

SMALL = ["model.tiny.hidden_size=32", "model.tiny.heads=1", "model.tiny.layers=1", "model.warmstart.steps=0"]
HERE: dict[str, Any] = {"cores": 2, "gpus": []}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def arms(*arguments: str) -> tuple[Plan, list[Arm]]:
    plan, given = load_plan(arguments)
    return plan, make_arms(plan, [*SMALL, *given])


def test_every_arm_can_run_and_keeps_to_the_controls() -> None:
    names = load_plan([])[0].definitions
    plan, made = arms(f"arms=[{','.join(names)}]")
    assert [arm.name for arm in made] == list(names)
    samples = {arm.config.data.prompts_per_step * arm.config.rollout.samples_per_prompt for arm in made}
    assert samples == {plan.completions}
    assert len({arm.model for arm in made}) == 1
    quarter = next(arm for arm in made if arm.name == "ppo_8_quarter")
    assert quarter.critic_model != quarter.model
    assert {arm.name: arm.critic_model is None for arm in made}["grpo_8"]


@pytest.mark.parametrize("setting", ["algo.clip_ratio_low: 0.1", "actor.lr: 1.0e-3", "rollout.temperature: 0.7"])
def test_arms_that_differ_in_a_forbidden_key_are_refused(setting: str) -> None:
    key, value = setting.split(": ")
    with pytest.raises(ConfigError, match=rf"{key}: ppo_8 has .*, grpo_8 has {float(value)}") as caught:
        arms("arms=[ppo_8,grpo_8]", f"definitions.grpo_8.settings={{{setting}}}")
    assert "add a key to `allowed`" in str(caught.value)


def test_what_is_allowed_is_a_setting() -> None:
    allowed, slower = load_plan([])[0].allowed, "definitions.grpo_8.settings={actor.lr: 1.0e-3}"
    arms("arms=[ppo_8,grpo_8]", slower, f"allowed=[{','.join([*allowed, 'actor.lr'])}]")
    with pytest.raises(ConfigError, match="adv_estimator: ppo_8 has gae, grpo_8 has grpo"):
        arms("arms=[ppo_8,grpo_8]", slower, "allowed=[actor.lr]")


@pytest.mark.parametrize("argument", ["arms=" + "[" * 100_000 + "]" * 100_000, "completions=" + "9" * 5000])
def test_a_plan_that_nobody_can_read_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"more than 64 deep|cannot be read"):
        load_plan([argument])


def test_other_first_weights_are_refused() -> None:
    _, [one, other] = arms("arms=[ppo_8,grpo_8]")
    moved = replace(other, model=one.model + "-else")
    with pytest.raises(ConfigError, match="first weights: ppo_8 has"):
        check_controls([one, moved], load_plan([])[0].allowed)


def test_a_setting_of_every_run_reaches_the_arms_that_read_it() -> None:
    _, [ppo, grpo] = arms("arms=[ppo_8,grpo_8]", "run.steps=7", "critic.lr=0.5", "algo.lam=0.9")
    assert (ppo.config.run.steps, grpo.config.run.steps) == (7, 7)
    assert (ppo.config.critic.lr, ppo.config.algo.lam) == (0.5, 0.9)
    assert not any(text.startswith(("critic.", "algo.lam")) for text in grpo.overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arms=[grpo_88]"], "arms: grpo_88 is not defined. Did you mean grpo_8?"),
        (["arms=[grpo_8,grpo_8]"], "without repetition"),
        (["comparisons=[[ppo_8,grpo_88]]"], "comparisons: grpo_88 is not defined. Did you mean grpo_8?"),
        (["comparisons=[[ppo_8]]"], "each is a pair of arms"),
        (["arms=[]"], "expected at least one of each, without repetition"),
        (["seeds=[one]"], "seeds"),
        (["rollout.seed=1"], "rollout.seed=1: the benchmark sets rollout.seed for each run. Leave it out"),
        (["definitions.ppo_8.label='PPO, G=1'"], "two arms have the same label"),
        (["arms=[grpo_8]", "completions=20"], "completions=20 samples per step are not a multiple of its group of 8"),
        (["arms=[grpo_8]", "run.stepz=3"], "run.stepz: no such setting. Did you mean run.steps?"),
        (["arms=[ppo_8_quarter]", "model.path=x"], "definitions.ppo_8_quarter.critic_path=FOLDER"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        arms(*arguments)


def test_arms_alternate() -> None:
    """Every arm runs with every seed, and each seed starts with a different arm."""
    made = [Arm(name, name, (), None, "", None, frozenset()) for name in "abc"]  # type: ignore[arg-type]
    found = [(arm.name, seed) for arm, seed in order(made, [0, 1, 2, 3])]
    assert len(set(found)) == 12
    assert [name for name, _ in found] == list("abcbcacababc")


@pytest.mark.parametrize(
    ("given", "cluster"),
    [
        ([], "inline"),
        (["cluster=local"], "local"),
        (["cluster.num_cpus=2"], "local"),
        (["model.path=gpt2"], "local"),
    ],
)
def test_all_in_one_process_is_for_the_embedded_model(given: list[str], cluster: str) -> None:
    _, [arm] = arms("arms=[grpo_8]", *given)
    assert arm.config.cluster.name == cluster


def test_a_folder_with_other_runs_is_refused(tmp_path: Path) -> None:
    """Existing results are neither mixed with runs of other settings nor overwritten."""
    plan, made = arms("arms=[grpo_8]", "seeds=[0]", f"out={tmp_path}")
    kept = Run("grpo_8", 0, "failed", "lost", copy.deepcopy(made[0].settings), {}, None, None, HERE, [])
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "grpo_8-seed0.json"
    path.write_text(json.dumps(vars(kept), default=str))
    assert [one["error"] for one in run_all(made, plan.seeds, tmp_path, HERE)] == ["lost"]
    with pytest.raises(ConfigError, match="grpo_8-seed0 with cores=2, but it is 64"):
        run_all(made, plan.seeds, tmp_path, {**HERE, "cores": 64})
    _, other = arms("arms=[grpo_8]", "actor.lr=1.0e-3")
    with pytest.raises(ConfigError, match=r"grpo_8-seed0 with actor.lr=0\.0001, but it is 0\.001"):
        run_all(other, plan.seeds, tmp_path, HERE)


def test_two_benchmarks_do_not_share_a_folder(tmp_path: Path) -> None:
    _, made = arms("arms=[grpo_8]")
    with claimed(tmp_path), pytest.raises(ConfigError, match="another process trains into"):
        run_all(made, [0], tmp_path, HERE)


def test_a_run_that_is_refused_is_no_result(tmp_path: Path) -> None:
    """A user error ends the benchmark, and no result is written."""
    _, made = arms("arms=[grpo_8]")
    broken = replace(made[0], overrides=(*made[0].overrides, "run.steps=none"))
    with pytest.raises(ConfigError, match=r"grpo_8-seed0 was refused: .*run\.steps"):
        run_all([broken], [0], tmp_path, HERE)
    assert not list((tmp_path / "runs").glob("*.json"))
