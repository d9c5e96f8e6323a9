"""The first page of the benchmark's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planted_runs import raw, run

from tandem.benchmarks.ab.comparison import false_discovery_rates, p_value, seeds_to_tell
from tandem.benchmarks.ab.page import write
from tandem.benchmarks.ab.results import derive
from tandem.benchmarks.ab.summary import FAULT, UNCLEAR, WON, costs, recommendation, verdict_rows

LEARNT = {"critic/explained_variance": [0.0, 0.0, 0.5, 0.7]}
Results = dict[str, Any]


def results(one: float, two: float, slow: float = 1.0, columns: dict[str, list[float]] = LEARNT) -> Results:
    """Five seeds; `one` has a critic and takes `slow` times as long for a step."""
    seconds = {"time/step_s": [2.0 * slow] * 4}
    runs = [run("one", seed, accuracy=one, **seconds, **columns) for seed in range(5)]
    runs += [run("two", seed, accuracy=two) for seed in range(5)]
    made = raw(runs, comparisons=[["one", "two"]])
    return {**made, "derived": derive(made)}


def test_a_verdict_says_who_is_better_at_each_budget() -> None:
    [row] = verdict_rows(results(0.8, 0.6))
    assert row.pair == "One against Two"
    assert {(cell.word, cell.look) for cell in row.cells} == {("One better", WON)}
    assert row.cells[0].detail == "+0.200 [+0.200, +0.200]"
    [row] = verdict_rows(results(0.5, 0.6))
    assert {cell.word for cell in row.cells} == {"Two better"}
    [row] = verdict_rows(results(0.6, 0.6))
    assert {(cell.word, cell.look) for cell in row.cells} == {("no difference shown", UNCLEAR)}


def test_a_fault_comes_before_who_is_better() -> None:
    [row] = verdict_rows(results(0.8, 0.6, columns={"critic/explained_variance": [0.0] * 4}))
    assert {(cell.word, cell.look) for cell in row.cells} == {("critic did not learn", FAULT)}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (results(0.8, 0.6), "One is better at equal wall time"),
        (results(0.8, 0.7, slow=1.5), "One is better at equal completions and not shown to be at equal wall time"),
        (results(0.6, 0.8), "Two is better at equal wall time"),
        (results(0.6, 0.6), "No difference is shown; Two needs no critic"),
        (results(0.8, 0.6, columns={"critic/explained_variance": [0.0] * 4}), "Do not decide between One and Two by this"),
    ],
)
def test_the_recommendation_follows_from_the_verdicts(found: Results, said: str) -> None:
    assert recommendation(found).startswith(said)


def test_what_the_critic_costs() -> None:
    assert [value for value, _ in costs(results(0.8, 0.6))] == ["0%", "18 B", "0.60"]


def test_the_page_shows_it_first(tmp_path: Path) -> None:
    page = write(results(0.8, 0.6), tmp_path).read_text()
    table, _, details = page.partition("<details")
    assert table.count('class="won">One better<span>+0.200') == 6
    assert "One is better at equal wall time" in table
    assert "The trained model is m" in table
    assert table.count("<svg") >= 3
    assert "Cost of a step" in details
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.index("One better") < markdown.index("figure.svg")


def test_p_values_are_those_of_a_paired_t_test() -> None:
    """Differences 1, 2, 3, 4, 5: mean 3, standard error sqrt(2.5 / 5); t = 4.243 with 4 degrees of freedom."""
    assert p_value([1, 2, 3, 4, 5], [0] * 5) == pytest.approx(0.01324, abs=1e-5)
    assert p_value([1, 1, 1], [1, 1, 1]) == 1
    assert p_value([2, 2, 2], [1, 1, 1]) == 0
    assert p_value([1], [0]) is None


def test_false_discovery_rates_by_hand() -> None:
    """Benjamini and Hochberg: p(i) m / i, and no more than that of any larger p: .01 * 3 / 1, .02 * 3 / 2, .9 * 3 / 3."""
    assert false_discovery_rates([0.9, 0.01, 0.02]) == pytest.approx([0.9, 0.03, 0.03])
    assert false_discovery_rates([]) == []


def test_seeds_to_tell_a_difference() -> None:
    """Mean 1, standard deviation 1: t(.975, n - 1) < sqrt(n) holds from n = 7 on (2.447 against 2.646)."""
    spread = [2.0, 0.0, 2.0, 0.0, 1.0]  # deviations 1, 1, 1, 1, 0 over 4: standard deviation 1
    assert seeds_to_tell(spread, [0.0] * 5) == 7
    assert seeds_to_tell([1.0] * 5, [0.0] * 5) == 5
    assert seeds_to_tell([1.0, -1.0], [0.0, 0.0]) is None
    assert seeds_to_tell([1.01, -1.0], [0.0, 0.0]) is None
    assert seeds_to_tell([1.0], [0.0]) is None
