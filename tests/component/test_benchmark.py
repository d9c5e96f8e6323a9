"""The benchmark's controls, statistics and report, on planted results."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ab.arms import Arm, Plan, check_controls, load_plan, make_arms
from ab.measure import AXES, ITEMS, Measured, costs, learning, memory, spending, timed_steps, times
from ab.page import rebuild, write
from ab.results import derive
from ab.runs import Run, order, run_all
from ab.verdict import sentences
from tandem.launch.run import claimed
from tandem.platform.config import ConfigError
from tandem.platform.costs import ModelShape

SMALL = ["model.tiny.hidden_size=32", "model.tiny.heads=1", "model.tiny.layers=1", "model.warmstart.steps=0"]
MEMORY = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 2, "baseline": 80, "peak": 100}
HERE: dict[str, Any] = {"cores": 2, "gpus": []}
SHAPE = {"layers": 1, "attention_width": 4, "block_parameters": 100, "head_parameters": 20}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def arms(*arguments: str) -> tuple[Plan, list[Arm]]:
    plan, given = load_plan(arguments)
    return plan, make_arms(plan, [*SMALL, *given])


# Arms and controls


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
        (["arms=[grpo_8,grpo_8]"], "each is named once"),
        (["comparisons=[[ppo_8,grpo_88]]"], "comparisons: grpo_88 is not defined. Did you mean grpo_8?"),
        (["comparisons=[[ppo_8]]"], "each is a pair of arms"),
        (["arms=[]"], "each is named once, and there is one at least"),
        (["seeds=[one]"], "seeds"),
        (["rollout.seed=1"], "rollout.seed=1: the benchmark sets rollout.seed for each of its runs. Leave it out"),
        (["definitions.ppo_8.label='PPO, G=1'"], "two of them have one label"),
        (["arms=[grpo_8]", "completions=20"], "completions=20 samples per step are no multiple of its group of 8"),
        (["arms=[grpo_8]", "run.stepz=3"], "run.stepz: no such setting. Did you mean run.steps?"),
        (["arms=[ppo_8_quarter]", "model.path=x"], "definitions.ppo_8_quarter.critic_path=FOLDER"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        arms(*arguments)


def test_arms_alternate() -> None:
    """Every arm with every seed, and each seed begins with another arm."""
    made = [Arm(name, name, (), None, "", None, frozenset()) for name in "abc"]  # type: ignore[arg-type]
    found = [(arm.name, seed) for arm, seed in order(made, [0, 1, 2, 3])]
    assert len(set(found)) == 12
    assert [name for name, _ in found] == list("abcbcacababc")


# Measures


def run(arm: str = "one", seed: int = 0, steps: int = 4, accuracy: float = 0.5, **columns: list[float]) -> dict[str, Any]:
    """A run's raw results: two-second steps of 8 samples, evaluated at the beginning and at the end."""
    made: dict[str, list[float]] = {
        "time/step_s": [2.0] * steps,
        "time/generate_s": [1.0] * steps,
        "time/update_actor_s": [0.5] * steps,
        "samples/sampled": [8.0] * steps,
        "sampling/rounds": [1.0] * steps,
        "tokens/prompt": [40.0] * steps,
        "tokens/response": [24.0] * steps,
        "policy/epochs": [1.0] * steps,
        "reward/mean": [accuracy] * steps,
    }
    return {
        "arm": arm,
        "seed": seed,
        "status": "finished",
        "error": None,
        "identity": {"first_weights": "w", "data": "d"},
        "startup_s": 3.0,
        "devices": 2.0,
        "steps": made | columns,
        "evals": {"eval/held/greedy": [[0, 0.4], [steps, accuracy]]},
        "memory": {"actor": dict(MEMORY)} | ({"critic": dict(MEMORY)} if arm == "one" else {}),
    }


def raw(runs: list[dict[str, Any]], **plan: Any) -> dict[str, Any]:
    """Raw results of arms `one` (with a critic) and `two`."""
    names = list(dict.fromkeys(one["arm"] for one in runs))
    shared = {"is_plain": True, "group": 4, "prompts": 2, "actor": SHAPE, "differs": {}}
    made = [
        {"name": name, "label": name.title(), "algo": name, "critic": SHAPE if name == "one" else None, **shared}
        for name in names
    ]
    return {
        "plan": {
            "seeds": sorted({one["seed"] for one in runs}),
            "skip_steps": 1,
            "completions": 8,
            "comparisons": [],
            **plan,
        },
        "machine": {"cores": 2, "gpus": [], "versions": {"torch": "x"}},
        "peak_flops": 1e9,
        "model": {"path": "m", "parameters": 120, "digest": "w"},
        "data": "sums",
        "settings": {
            "run.steps": 4,
            "train.minibatches": 2,
            "train.epochs_per_batch": 1,
            "model.gradient_checkpointing": False,
            "cluster.name": "local",
        },
        "arms": made,
        "runs": runs,
    }


def measured(**columns: list[float]) -> Measured:
    made = run(**columns)  # type: ignore[arg-type]
    evals = {key: [(int(step), value) for step, value in points] for key, points in made["evals"].items()}
    return Measured("one", 0, made["steps"], evals, made["memory"], 3.0, devices=3)


def test_spending_by_hand() -> None:
    """Noise is measured in the second step, and does not count; the policy stands still in the first."""
    found = spending(measured(**{"time/gradient_noise_s": [0, 0.5, 0, 0], "policy/epochs": [0, 1, 1, 1]}), 2, 2)
    assert found == {
        "completions": [0, 8, 16, 24, 32],
        "tokens": [0, 24, 48, 72, 96],
        "prompts": [0, 2, 4, 6, 8],
        "updates": [0, 0, 2, 4, 6],
        "seconds": [0, 2, 3.5, 5.5, 7.5],
        "device_seconds": [0, 6, 10.5, 16.5, 22.5],
    }


def test_a_reward_is_averaged_over_three_steps() -> None:
    one = measured(**{"reward/mean": [0.0, 0.3, 0.6, 0.9]})
    found = learning(one, [0, 8, 16, 24, 32], "reward/mean")
    assert [x for x, _ in found] == [0, 8, 16, 24, 32]
    assert [y for _, y in found] == pytest.approx([0.0, 0.0, 0.15, 0.3, 0.6])


def test_a_critic_that_learns_alone_is_not_timed() -> None:
    assert timed_steps(measured(**{"policy/epochs": [0, 0, 1, 1]}), skip=1) == [2, 3]
    assert timed_steps(measured(**{"policy/epochs": [0, 0, 0, 0]}), skip=1) == [1, 2, 3]


def test_noise_measured_in_every_step_is_taken_out_of_the_time() -> None:
    one = measured(**{"time/gradient_noise_s": [0.5] * 4})
    assert times(one, skip=1) == {"step": 1.5, "generate": 1.0, "update_actor": 0.5, "rest": 0.0}


def test_first_steps_and_those_that_measure_more_are_not_timed() -> None:
    assert timed_steps(measured(**{"time/gradient_noise_s": [0, 0, 0.1, 0]}), skip=1) == [1, 3]
    assert timed_steps(measured(), skip=9) == [0, 1, 2, 3]  # rather all than none


def test_costs_by_hand() -> None:
    """Steps 2, 3, 4 count: 2, 2, 5 s, of which 1.5 s are the critic's."""
    one = measured(
        **{"time/step_s": [9, 2, 2, 5], "time/infer_values_s": [9, 0.5, 0.5, 0.5], "time/update_critic_s": [9, 1, 1, 1]}
    )
    settings = raw([])["settings"]
    found = costs(one, 1, 2, (ModelShape(**SHAPE), ModelShape(**SHAPE)), settings, peak=1e6)
    assert found["seconds"]["step"] == 3
    assert found["critic_share"] == pytest.approx(0.5)
    assert found["response_tokens_per_s"] == pytest.approx(8)
    assert found["tokens_per_s"] == pytest.approx(64 / 3)
    assert sum(value for part, value in found["seconds"].items() if part != "step") == pytest.approx(3)
    assert found["share_of_peak"]["update_critic"] == pytest.approx(found["flops"]["update_critic"] / 1e6)


# What the results say


def paired(better: float, noise: float, seeds: int = 5) -> dict[str, Any]:
    """Two arms with seeds that differ by far more than the arms do."""
    draw, runs = random.Random(3), []
    for seed in range(seeds):
        level = draw.uniform(0.4, 0.9)
        runs += [run("one", seed, accuracy=level + better + draw.gauss(0, noise)), run("two", seed, accuracy=level)]
    return derive(raw(runs, comparisons=[["one", "two"]]))


def at(derived: dict[str, Any], axis: str = "completions", metric: str = "eval/held/greedy") -> dict[str, Any]:
    found = [one for one in derived["comparisons"] if (one["axis"], one["metric"]) == (axis, metric)]
    assert len(found) == 1
    return dict(found[0])


def test_a_planted_better_arm_is_found() -> None:
    found = at(paired(better=0.03, noise=0.005))
    assert found["verdict"] == "more"
    assert found["difference"]["value"] == pytest.approx(0.03, abs=0.01)
    assert found["difference"]["low"] > 0


def test_an_arm_against_itself_shows_no_difference() -> None:
    """The same distribution, other seeds: pairing cannot help, and nothing is claimed."""
    draw, said = random.Random(5), []
    for _ in range(20):
        runs = [run(arm, seed, accuracy=draw.gauss(0.7, 0.05)) for seed in range(5) for arm in ("one", "two")]
        said.append(at(derive(raw(runs, comparisons=[["one", "two"]])))["verdict"])
    assert said.count("no difference shown") >= 17


def test_planted_results_give_the_known_interval() -> None:
    """Differences .01 to .05: see test_comparison.py for 1 to 5. Axes that both arms spend alike say the same."""
    runs = [run("one", seed, accuracy=0.5 + 0.01 * (seed + 1)) for seed in range(5)]
    derived = derive(raw([*runs, *(run("two", seed, accuracy=0.5) for seed in range(5))], comparisons=[["one", "two"]]))
    for axis in AXES:
        found = at(derived, axis)
        assert [found["difference"][key] for key in ("value", "low", "high")] == pytest.approx([0.03, 0.012, 0.048])
        assert found["interquartile_mean"] == pytest.approx([0.53, 0.5])
        assert found["probability_of_improvement"] == 1.0


def test_few_seeds_show_nothing_and_are_called_few() -> None:
    assert at(paired(better=0.3, noise=0.0, seeds=4))["verdict"] == "too few seeds (4)"
    assert at(paired(better=0.3, noise=0.0, seeds=1))["verdict"] == "too few seeds (1)"


def test_two_arms_are_cut_where_both_got_to() -> None:
    """Arm two takes twice the time for a step: at 8 s it has made half its steps, and its line is half way up."""
    slow = [run("two", seed, accuracy=0.8, **{"time/step_s": [4.0] * 4}) for seed in range(5)]
    for one in slow:
        one["evals"]["eval/held/greedy"].insert(1, [1, 0.5])
    short = [run("three", seed, steps=1) for seed in range(5)]
    fast = [run("one", seed, accuracy=0.8) for seed in range(5)]
    derived = derive(raw(fast + slow + short, comparisons=[["one", "two"]]))
    assert derived["budgets"]["seconds"] == 2
    assert at(derived, "seconds")["budget"] == 8
    assert at(derived, "seconds")["difference"]["value"] == pytest.approx(0.8 - 0.6)
    assert at(derived, "completions")["difference"]["value"] == 0


def test_what_was_not_measured_is_not_compared() -> None:
    """Arm two has spent all prompts before arm one is first evaluated: a line from the beginning on says nothing."""
    many = [run("one", seed, **{"sampling/rounds": [9.0] * 4}) for seed in range(5)]
    derived = derive(raw([*many, *(run("two", seed) for seed in range(5))], comparisons=[["one", "two"]]))
    found = at(derived, "prompts")
    assert (found["difference"], found["verdict"]) == (None, "not comparable: spent before the first measurement")
    assert at(derived, "completions")["verdict"] == "no difference shown"


def test_a_policy_that_never_moved_is_not_compared_by_its_updates() -> None:
    still = [run("one", seed, **{"policy/epochs": [0.0] * 4}) for seed in range(5)]
    derived = derive(raw([*still, *(run("two", seed) for seed in range(5))], comparisons=[["one", "two"]]))
    assert at(derived, "updates")["difference"] is None


def test_steps_without_a_reward_and_runs_without_held_out_data() -> None:
    runs = [run(arm, seed, **{"reward/mean": [0.5, None, 0.5, 0.5]}) for seed in range(5) for arm in ("one", "two")]
    for one in runs:
        one["evals"] = {}
    derived = derive(raw(runs, comparisons=[["one", "two"]]))
    assert derived["metrics"] == ["reward/mean"]
    assert at(derived, metric="reward/mean")["verdict"] == "no difference shown"
    assert derived["arms"]["one"]["trends"]["reward/mean"] == 0.5
    assert [step for step, _ in derived["arms"]["one"]["trend_curves"].get("policy/entropy", [])] == []


def test_a_crash_is_a_result() -> None:
    lost = {**run("two", 4), "status": "failed", "error": "CUDA out of memory", "steps": {}, "evals": {}, "startup_s": None}
    results = raw([run(arm, seed) for seed in range(5) for arm in ("one", "two") if (arm, seed) != ("two", 4)] + [lost])
    results["plan"]["comparisons"] = [["one", "two"]]
    derived = derive(results)
    assert (
        derived["arms"]["two"] | {"finished": 4, "runs": 5, "errors": ["seed 4: CUDA out of memory"]}
        == derived["arms"]["two"]
    )
    assert at(derived)["seeds"] == [0, 1, 2, 3]
    assert "Two did not finish: seed 4: CUDA out of memory." in sentences({**results, "derived": derived})


def test_runs_that_did_not_begin_alike_are_refused() -> None:
    other = {**run("two"), "identity": {"first_weights": "v", "data": "d"}}
    with pytest.raises(ConfigError, match="runs began with different first_weights: one seed 0 w, two seed 0 v"):
        derive(raw([run("one"), other]))


def test_nothing_finished_is_said() -> None:
    lost = {**run("one"), "status": "failed", "error": "no memory"}
    with pytest.raises(ConfigError, match=r"no run has finished.*one seed 0: no memory"):
        derive(raw([lost]))


def test_memory_adds_up_to_the_peak_of_each_process() -> None:
    for found in memory(measured(), one_process=False).values():
        assert found["other"] == 100 - (4 + 4 + 8 + 2 + 80)
        assert sum(value for kind, value in found.items() if kind != "peak") == found["peak"]


def test_memory_of_one_process_adds_up_to_its_peak() -> None:
    """The critic came later, and found the actor's 4 bytes of weights there; the activations of one of them count."""
    made = replace(measured(), memory={"actor": MEMORY, "critic": {**MEMORY, "baseline": 84, "peak": 130}})
    found = memory(made, one_process=True)
    assert found["process"] == {**dict.fromkeys(ITEMS, 0.0), "baseline": 80, "other": 130 - 80 - 2 * 16 - 2, "peak": 130}
    assert found["critic"] == {**MEMORY, "cache": 0, "baseline": 0, "other": 0, "peak": 0}


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


# Files


def test_the_report_is_built_again_from_its_results_alone(tmp_path: Path) -> None:
    results = raw([run(arm, seed) for seed in range(5) for arm in ("one", "two")], comparisons=[["one", "two"]])
    first = {
        name: path.read_text()
        for path in [write({**results, "derived": derive(results)}, tmp_path)]
        for name in [path.name]
    }
    kept = json.loads((tmp_path / "results.json").read_text())
    kept["derived"] = {}
    (tmp_path / "results.json").write_text(json.dumps(kept))
    rebuild(tmp_path)
    assert {"report.html": (tmp_path / "report.html").read_text()} == first
    assert "no difference shown" in (tmp_path / "report.md").read_text()
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 11
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_results_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ConfigError, match=r"report=.*: no results\.json to build from"):
        rebuild(tmp_path)


def test_a_folder_with_other_runs_is_refused(tmp_path: Path) -> None:
    """What has been measured is neither mixed with other settings nor made again."""
    plan, made = arms("arms=[grpo_8]", "seeds=[0]", f"out={tmp_path}")
    kept = Run("grpo_8", 0, "failed", "lost", copy.deepcopy(made[0].settings), {}, None, None, HERE, [])
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "grpo_8-seed0.json"
    path.write_text(json.dumps(vars(kept), default=str))
    assert [one["error"] for one in run_all(made, plan.seeds, tmp_path, HERE)] == ["lost"]
    with pytest.raises(ConfigError, match="grpo_8-seed0 with cores=2, now it is 64"):
        run_all(made, plan.seeds, tmp_path, {**HERE, "cores": 64})
    _, other = arms("arms=[grpo_8]", "actor.lr=1.0e-3")
    with pytest.raises(ConfigError, match=r"grpo_8-seed0 with actor.lr=0\.0001, now it is 0\.001"):
        run_all(other, plan.seeds, tmp_path, HERE)


def test_two_benchmarks_do_not_share_a_folder(tmp_path: Path) -> None:
    _, made = arms("arms=[grpo_8]")
    with claimed(tmp_path), pytest.raises(ConfigError, match="another process trains into"):
        run_all(made, [0], tmp_path, HERE)


def test_a_run_that_is_refused_is_no_result(tmp_path: Path) -> None:
    """What the user has to mend ends the benchmark, and nothing of it is kept."""
    _, made = arms("arms=[grpo_8]")
    broken = replace(made[0], overrides=(*made[0].overrides, "run.steps=none"))
    with pytest.raises(ConfigError, match=r"grpo_8-seed0 was refused: .*run\.steps"):
        run_all([broken], [0], tmp_path, HERE)
    assert not list((tmp_path / "runs").glob("*.json"))
