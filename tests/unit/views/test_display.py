"""The content of progress lines."""

from __future__ import annotations

import io
import sys

import pytest

from tandem.launch.views import display as module
from tandem.launch.views.display import AROUND, WORDS, PlainDisplay, RichDisplay, headline, make_display, warm_start, worded
from tandem.platform.config.schema import TrackingConfig
from tandem.platform.loop.spans import PHASES


def test_unscorable_samples_are_not_passed_over() -> None:
    assert headline({"reward/unscorable": 3.0, "samples/sampled": 16.0}) == [("unscorable", "3 of 16")]
    assert headline({"reward/unscorable": 0.0, "samples/sampled": 16.0}) == []


def test_how_much_of_the_data_has_been_passed_is_shown() -> None:
    assert headline({"reward/mean": 0.5, "data/epoch": 1.25}) == [("reward", "0.500"), ("epoch", "1.25")]


def test_every_accuracy_is_shown_and_no_count() -> None:
    names = ("greedy", "mean", "pass@4", "greedy_unscorable", "greedy_length_mean")
    shown = headline({f"eval/held/{name}": 0.5 for name in names})
    assert shown == [(f"eval/held/{name}", "0.500") for name in names[:3]]


def test_plain_lines_are_about_fifty_and_every_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    display.begin(200)
    for step in range(201):
        display.step(step, {"reward/mean": 0.5} | ({"eval/held/greedy": 0.25} if step in (0, 7) else {}))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 53  # step 0, 1, 7 and every fourth
    assert "step 7/200  reward 0.500  eval/held/greedy 0.250" in lines


def test_what_cannot_move_is_not_shown() -> None:
    metrics = {"reward/mean": 0.5, "policy/approx_kl": 0.0}
    assert headline(metrics) == [("reward", "0.500"), ("approx kl", "0")]
    assert headline(metrics, {"policy/approx_kl"}) == [("reward", "0.500")]


def test_phases_have_names_for_people() -> None:
    assert worded("update_actor") == "updating the policy"
    assert worded("a_new_span") == "a new span"
    assert {*PHASES, *AROUND} - {"step"} <= WORDS.keys()


def test_plain_lines_say_what_is_done_up_to_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    for name in ("model", "data", "roles"):
        display.phase(name)
    display.begin(9)
    display.phase("evaluate")
    display.step(0, {"eval/held/greedy": 0.25})
    for step in (1, 2):
        for name in ("step", "generate", "score", "score", "update", "update_actor"):
            display.phase(name)
        display.step(step, {"reward/mean": 0.5})
    display.phase("closing")
    assert capsys.readouterr().out.splitlines() == [
        "preparing the model",
        "reading the data",
        "starting the roles",
        "evaluating",
        "step 0/9  eval/held/greedy 0.250",
        "first step: sampling",
        "first step: scoring",
        "first step: updating the policy",
        "step 1/9  reward 0.500",
        "step 2/9  reward 0.500",
    ]


def test_the_warm_start_is_shown_as_it_goes_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of four seconds: a line at the beginning, and one once ten seconds have passed."""
    clock = iter([100.0, 104.0, 108.0, 112.0, 116.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    show = warm_start(PlainDisplay())
    for step in range(5):
        show(step, 4)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("building the embedded model: 4 steps of supervised fine-tuning")
    assert second == "building the embedded model: 3 of 4, about 4 s left"


def test_a_bar_counts_only_what_it_knows_the_number_of(capsys: pytest.CaptureFixture[str]) -> None:
    display = RichDisplay()
    display.phase("model")
    assert display._bar.tasks[0].fields["count"] == ""
    warm_start(display)(2, 4)
    [job] = display._bar.tasks
    assert (job.description, job.completed, job.total, job.fields["count"]) == ("building the embedded model", 2, 4, "2/4")
    display.phase("data")
    [after] = display._bar.tasks
    assert (after.description, after.total, after.fields["count"]) == ("reading the data", None, "")
    display.begin(3)
    display.step(1, {"reward/mean": 0.5})
    assert display._bar.tasks[0].fields["count"] == "1/3"
    display.close()
    assert "?" not in capsys.readouterr().out


class Gone(io.StringIO):
    """An output whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("console", ["plain", "rich", "none"])
def test_a_display_that_fails_does_not_stop_the_run(console: str, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", errors)
    display = make_display(TrackingConfig(console=console))
    display.begin(3)
    for step in range(4):
        display.phase("generate")
        display.progress("a job", step, 3)
        display.step(step, {"reward/mean": 0.5, "eval/held/greedy": 0.5})
        display.note("a note")
    display.close()
    assert errors.getvalue().count("the display has failed") == (console != "none")


def test_a_line_is_shown_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    PlainDisplay().note("7é \ud800")
    assert shown.getvalue() == b"7\\xe9 \\ud800\n"
