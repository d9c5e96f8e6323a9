"""Charts as SVG text."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from tandem.launch.views.charts import areas, bars, intervals, lines, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 160, [0, 50, 100, 150, 200]),
        (-0.03, 0.05, [-0.04, -0.02, 0, 0.02, 0.04, 0.06]),
        (3, 3, [3]),
    ],
)
def test_ticks_are_round_and_span_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_line_goes_where_its_values_are() -> None:
    root = ElementTree.fromstring(
        lines("a < b", {"one": [(0, 0.0), (10, 1.0)], "two": [(0, 0.5), (5, math.nan), (10, 0.5)]})
    )
    one, two = [element.attrib["points"] for element in root.iter() if element.tag.endswith("polyline")]
    assert one == "58.0,206.0 448.0,30.0"  # from the lower left corner of the frame to its upper right one
    assert two == "58.0,118.0 448.0,118.0"  # what is not finite is left out
    looks = {element.attrib["stroke-dasharray"] for element in root.iter() if element.tag.endswith("polyline")}
    assert len(looks) == 2


def test_areas_add_up() -> None:
    root = ElementTree.fromstring(areas("time", {"a": [(0, 1.0), (1, 1.0)], "b": [(0, 1.0), (1, 3.0)]}, "s"))
    a, b = [element.attrib["points"] for element in root.iter() if element.tag.endswith("polygon")]
    assert a.split()[:2] == b.split()[:1:-1]  # the upper edge of the first is the lower one of the second


def test_bars_are_as_long_as_their_values() -> None:
    root = ElementTree.fromstring(bars("memory", {"x": {"w": 1.0, "g": 2.0}, "y": {"w": 1.5}}, "GiB"))
    widths = [float(e.attrib["width"]) for e in root.iter() if e.tag.endswith("rect") and e.attrib["height"] == "18"]
    assert widths == pytest.approx([100, 200, 150], abs=0.1)


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-200, 1.0, 2.0**62, 1e99, 1e100, 1e308, -1e308])
@pytest.mark.parametrize("other", [0.0, 5e-324, 1.0, 1.0 + 2**-52, 2.0**62, -1e100, 1e308, math.inf])
def test_any_number_can_be_drawn_or_left_out(value: float, other: float) -> None:
    for chart in (
        lines("l", {"one": [(0, value)], "two": [(0, value), (1, other)]}, zero=True),
        lines("l", {"one": [(abs(value), 1.0), (abs(other), 1.0)]}),
        areas("a", {"one": [(0, value), (1, other)], "two": [(0, other), (1, value)]}),
        bars("b", {"x": {"one": value, "two": other}}),
        intervals("i", {"x": (value, other, value)}),
    ):
        assert "nan" not in chart
        assert "inf" not in chart


def test_nothing_to_draw_is_nothing() -> None:
    assert lines("a", {"one": []}) == areas("a", {}) == bars("a", {"x": {}}) == ""
