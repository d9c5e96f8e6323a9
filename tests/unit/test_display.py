"""What a line of progress says."""

from __future__ import annotations

import io
import sys

import pytest

from tandem.launch.display import PlainDisplay, headline, make_display
from tandem.platform.config import TrackingConfig


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
        display.step(step, {"reward/mean": 0.5, "eval/held/greedy": 0.5})
        display.note("a note")
    display.close()
    assert errors.getvalue().count("the display has failed") == (console != "none")


def test_a_line_is_shown_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    PlainDisplay().note("7é \ud800")
    assert shown.getvalue() == b"7\\xe9 \\ud800\n"
