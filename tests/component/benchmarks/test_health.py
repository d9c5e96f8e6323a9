"""Arms that did not work are named before a verdict on them."""

from __future__ import annotations

from typing import Any

import pytest
from planted_runs import raw, run

from tandem.benchmarks.ab.health import verdict_text
from tandem.benchmarks.ab.results import derive
from tandem.benchmarks.ab.tables import all_tables
from tandem.benchmarks.ab.verdict import sentences

FIVE = range(5)
GOOD = {"critic/explained_variance": [0.0, 0.0, 0.5, 0.7]}


def results(**columns: Any) -> dict[str, Any]:
    """Of `one` with a critic and `two` without, by the columns of each."""
    runs = [
        run(arm, seed, accuracy=0.5 + (arm == "one") / 5, **columns.get(arm, {})) for arm in ("one", "two") for seed in FIVE
    ]
    made = raw(runs, comparisons=[["one", "two"]])
    return {**made, "derived": derive(made)}


def verdicts(found: dict[str, Any]) -> set[str]:
    return {verdict_text(found, one) for one in found["derived"]["comparisons"] if one["axis"] == "completions"}


def test_only_the_second_half_of_training_counts() -> None:
    found = results(one=GOOD)["derived"]["arms"]["one"]["health"]
    assert found["explained"]["all tokens"] == pytest.approx(0.6)
    assert found["problem"] is None


def test_arms_that_worked_have_a_plain_verdict() -> None:
    found = results(one=GOOD, two={"group/zero_std_frac": [1.0, 1.0, 0.8, 0.7]})
    assert verdicts(found) == {"more"}
    assert not [text for text in sentences(found) if "do not judge" in text]
    title, _, rows = all_tables(found)[1]
    assert title == "Did each arm work?"
    assert [row[-1] for row in rows[1:]] == ["worked", "worked"]


def test_a_critic_that_did_not_learn_is_named_before_the_verdict() -> None:
    bad = {"critic/explained_variance": [0.9, 0.9, 0.09, 0.01], "critic/explained_variance_last": [0.0, 0.0, 0.2, 0.4]}
    found = results(one=bad)
    assert verdicts(found) == {"critic did not learn (One); more"}
    [said] = [text for text in sentences(found) if "do not judge" in text]
    assert said == (
        "One: critic did not learn; it explained less than 0.1 of the variance of the returns in the second half of "
        "training (0.05 for all tokens, 0.30 for the last token). Its comparisons do not judge the method."
    )
    assert "critic did not learn" in str(all_tables(found)[1])


def test_groups_without_signal_are_named_before_the_verdict() -> None:
    found = results(one=GOOD, two={"group/zero_std_frac": [0.0, 0.0, 0.9, 0.8]})
    assert verdicts(found) == {"groups without signal (Two); more"}
    [said] = [text for text in sentences(found) if "do not judge" in text]
    assert "85% of its groups had equal rewards in the second half of training, more than 80%" in said


def test_what_was_not_measured_is_no_problem() -> None:
    assert results()["derived"]["arms"]["one"]["health"]["problem"] is None


def causes(*arms: tuple[str, float, int], comparisons: list[list[str]]) -> list[str]:
    """The sentences on causes; an arm is a name, its accuracy, and its prompts per step. `one` has the critic."""
    made = raw([run(name, seed, accuracy=value) for name, value, _ in arms for seed in FIVE], comparisons=comparisons)
    for arm, (_, _, prompts) in zip(made["arms"], arms, strict=True):
        arm["prompts"], arm["group"] = prompts, 8 // prompts
    return [text for text in sentences({**made, "derived": derive(made)}) if "differ in prompts" in text]


def test_what_the_prompts_did_is_told_from_what_the_critic_did() -> None:
    arms = (("one", 0.9, 8), ("control", 0.85, 8), ("two", 0.8, 1))
    pairs = [["one", "two"], ["one", "control"], ["control", "two"]]
    [said] = causes(*arms, comparisons=pairs)
    assert said.startswith("One and Two differ in prompts per step too, 8 and 1. Control has 8 prompts and no critic")
    assert "+0.050 [+0.050, +0.050] is the critic's part and +0.050 [+0.050, +0.050] the part of the prompts" in said


def test_without_a_control_the_difference_is_nobodys_alone() -> None:
    [said] = causes(("one", 0.9, 8), ("two", 0.8, 1), comparisons=[["one", "two"]])
    assert "No arm has the same prompts without a critic" in said


def test_the_same_prompts_need_no_control() -> None:
    assert causes(("one", 0.9, 2), ("two", 0.8, 2), comparisons=[["one", "two"]]) == []
