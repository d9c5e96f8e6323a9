"""The benchmark's measures, statistics and report, on planted results."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from planted_runs import MEMORY, SHAPE, raw, run

from tandem.benchmarks.ab.measure import AXES, ITEMS, Measured, costs, learning, memory, spending, timed_steps, times
from tandem.benchmarks.ab.page import as_csv, rebuild, write
from tandem.benchmarks.ab.results import derive
from tandem.benchmarks.ab.tables import all_tables
from tandem.benchmarks.ab.verdict import sentences
from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.costs import ModelShape

FORMS = ("report.html", "report.md", "results.csv", "figure.svg")

# Measures


def measured(**columns: list[float]) -> Measured:
    made = run(**columns)  # type: ignore[arg-type]
    evals = {key: [(int(step), value) for step, value in points] for key, points in made["evals"].items()}
    return Measured("one", 0, made["steps"], evals, made["memory"], 3.0, devices=3)


def test_spending_by_hand() -> None:
    """The time to measure gradient noise in step 2 is not counted, and step 1 has no policy update."""
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
    """Steps 2, 3 and 4 count. They take 2, 2 and 5 s, and the critic takes 1.5 s of each."""
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
    """Two arms whose results differ far less between the arms than between seeds."""
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
    """Both arms have the same distribution but different seeds, so pairing cannot help and no difference is claimed."""
    draw, said = random.Random(5), []
    for _ in range(20):
        runs = [run(arm, seed, accuracy=draw.gauss(0.7, 0.05)) for seed in range(5) for arm in ("one", "two")]
        said.append(at(derive(raw(runs, comparisons=[["one", "two"]])))["verdict"])
    assert said.count("no difference shown") >= 17


def test_planted_results_give_the_known_interval() -> None:
    """Differences .01 to .05, as 1 to 5 in test_comparison.py. All axes agree, because both arms spend the same."""
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
    """Arm two takes twice as long per step: after 8 s it has done half its steps, and its accuracy is interpolated."""
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
    """Arm two has spent all its prompts before arm one is first evaluated, so there is nothing to compare."""
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


def test_a_share_that_cannot_be_is_no_figure() -> None:
    """Shows a share for a plausible time, but "?" for a share over 100 % and for a time measured beside other processes."""
    results = {**raw([run()], comparisons=[]), "peak": None}
    flops = derive(results)["arms"]["one"]["costs"]["flops"]["update_actor"]
    for peak, others, shown, why in (
        (flops / 0.25, None, "50%", ""),
        (flops, None, "?", "over 100 %"),
        (flops / 0.25, 0.4, "?", "timed beside other processes, on 40% of the cores"),
    ):
        results["peak_flops"], results["runs"][0]["others"] = peak, others
        title, note, rows = all_tables({**results, "derived": derive(results)})[2]
        assert title == "Cost of a step"
        assert rows[1][rows[0].index("update actor")] == shown
        assert why in note


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
    """The critic's baseline includes the actor's 4 bytes of weights; only one role's activations count."""
    made = replace(measured(), memory={"actor": MEMORY, "critic": {**MEMORY, "baseline": 84, "peak": 130}})
    found = memory(made, one_process=True)
    assert found["process"] == {**dict.fromkeys(ITEMS, 0.0), "baseline": 80, "other": 130 - 80 - 2 * 16 - 2, "peak": 130}
    assert found["critic"] == {**MEMORY, "cache": 0, "baseline": 0, "other": 0, "peak": 0}


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
    assert "<svg" in (tmp_path / "figure.svg").read_text()


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_results_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"(no results\.json to build|results\.json(: is a list|: lacks the field 'plan'|, column))"
    ):
        rebuild(tmp_path)


class Page(HTMLParser):
    """Collects the elements of a page and the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(tag, name) for name, _ in [("", ""), *attrs]}


def everywhere(value: Any, payload: str, under: str = "") -> Any:
    """A copy of `value` with a payload appended to every string, except strings that tell which runs belong together."""
    if isinstance(value, dict):
        return {key: everywhere(one, payload, key) for key, one in value.items()}
    if isinstance(value, list):
        return [everywhere(one, payload, under) for one in value]
    is_text = isinstance(value, str) and under not in ("status", "first_weights", "data")
    return value + payload if is_text else value


def test_nothing_planted_in_results_takes_effect(tmp_path: Path) -> None:
    payload = '<script>x</script>"><img onerror=x>](javascript:x)|\x1b[2J\r\n# x'
    runs = [run(arm, seed, accuracy=0.5 + seed / 20) for arm in ("one", "two") for seed in range(5)]
    plain = raw([*runs, {**run("two", 9), "status": "failed", "error": "why"}], comparisons=[["one", "two"]])
    for content, folder in ((plain, tmp_path / "a"), (everywhere(plain, payload), tmp_path / "b")):
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(content))
        rebuild(folder)
    clean, planted = ({name: (tmp_path / at / name).read_text() for name in FORMS} for at in ("a", "b"))
    for name in ("report.html", "figure.svg"):
        assert Page(planted[name]).found == Page(clean[name]).found
    assert "&lt;script&gt;" in planted["report.html"]
    assert not [text for text in ("<script", "<img", "](javascript", "\n# x") if text in planted["report.md"]]
    assert not [name for name, text in planted.items() if "\x1b" in text]


def test_a_cell_is_no_formula() -> None:
    results = {**raw([run()], comparisons=[])}
    results["runs"].append({**run(seed=1), "status": "failed", "error": "=HYPERLINK(1)"})
    assert ",'=HYPERLINK(1)," in as_csv({**results, "derived": derive(results)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runs": [3]}, r"field 'runs\.0' is a number, expected an object"),
        ({"machine": {"cores": "2", "gpus": [], "versions": {}}}, r"field 'machine\.cores' is text"),
        ({"peak_flops": True}, "field 'peak_flops' is true or false"),
        ({"settings": {}}, "is inconsistent: KeyError: 'train.minibatches'"),
        ({"arms": []}, "is inconsistent: KeyError: 'one'"),
    ],
)
def test_results_of_another_shape_are_told_with_their_field(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "results.json").write_text(json.dumps({**raw([run()]), **changes}))
    with pytest.raises(ConfigError, match=said):
        rebuild(tmp_path)
