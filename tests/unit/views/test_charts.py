"""Charts as SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tandem.launch.views.charts import Chart, Shape, areas, bars, intervals, lines, side_by_side
from tandem.launch.views.palette import COLOURS, LIGHT

SVG = "{http://www.w3.org/2000/svg}"


def painted(chart: Chart | None) -> Axes:
    """The axes of a chart."""
    assert chart is not None
    figure = Figure((chart.width / 72, chart.height / 72), dpi=72)
    chart.paint(figure)
    [axes] = figure.axes
    return axes


def test_a_line_goes_where_its_values_are() -> None:
    series = {"one": [(0, 0.0), (10, 1.0)], "none": [], "two": [(0, 0.5), (5, math.nan), (10, 0.5)]}
    one, two = painted(lines("a < b", series)).lines
    assert one.get_xydata().tolist() == [[0, 0], [10, 1]]
    assert two.get_xydata().tolist() == [[0, 0.5], [10, 0.5]]  # what is not finite is left out
    assert [one.get_color(), two.get_color()] == [COLOURS[0], COLOURS[2]]  # a series without data keeps its colour
    assert one.is_dashed() is False
    assert two.is_dashed() is True


def test_a_band_is_around_its_line() -> None:
    axes = painted(lines("a", {"one": [(0, 0.5), (1, 0.5)]}, bands={"one": [(0, 0.25, 0.75), (1, 0.5, 1.0)]}, zero=True))
    [band] = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} == {(0, 0.25), (0, 0.75), (1, 0.5), (1, 1.0)}
    assert axes.get_ylim()[0] <= 0


def test_areas_add_up() -> None:
    axes = painted(areas("time", {"a": [(0, 1.0), (1, 1.0)], "b": [(0, 1.0), (1, 3.0)]}, "s"))
    edges = [{tuple(point) for point in area.get_paths()[0].vertices.tolist()} for area in axes.collections]
    assert edges == [{(0, 0), (1, 0), (0, 1), (1, 1)}, {(0, 1), (1, 1), (0, 2), (1, 4)}]


def test_bars_are_as_long_as_their_values() -> None:
    axes = painted(bars("memory", {"x": {"w": 1.0, "g": 2.0}, "y": {"w": 1.5}}, "GiB"))
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (0, 1.5), (1, 2), (1.5, 0)]
    assert [text.get_text() for text in axes.texts] == ["3", "1.5"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["x", "y"]


def test_intervals_have_their_ends() -> None:
    line, dot, zero = painted(intervals("difference", {"x": (0.5, 0.25, 1.0)})).lines
    assert line.get_xdata().tolist() == [0.25, 1.0]
    assert dot.get_xdata().tolist() == [0.5]
    assert zero.get_xdata() == [0, 0]


def test_in_a_page_every_colour_is_the_palettes() -> None:
    """No colour of the drawing is left, so that all of it follows light and dark mode."""
    series = {str(number): [(0, 0.0), (1, float(number))] for number in range(8)}
    for chart in (lines("l", series), areas("a", series), bars("b", {"x": {"one": 1.0}}), intervals("i", {"x": (1, 0, 2)})):
        assert chart is not None
        text = chart.inline()
        assert not re.search('(?<!["(])#', text)  # but in the names of marks and frames
        assert "var(--s0)" in text
        assert "font-family" not in text


def test_a_file_is_complete_and_side_by_side() -> None:
    one, two = lines("one", {"a": [(0, 1.0)]}, shape=Shape(300)), bars("two", {"x": {"w": 1.0}}, shape=Shape(300))
    assert one is not None
    assert two is not None
    text = side_by_side([one, two, one])
    root = ElementTree.fromstring(text)
    assert root.attrib["viewBox"].split() == ["0", "0", "600", str(one.height * 2)]
    assert "var(" not in text
    assert COLOURS[0].lower() in text
    words = [part.text for part in root.iter(f"{SVG}text")]
    assert (words.count("one"), words.count("two")) == (2, 1)
    assert text == side_by_side([one, two, one])  # no date, no random names


def test_tips_and_texts_are_the_names() -> None:
    """No mathematics of TeX, no markup, nothing that steers a terminal, whatever a metric is called."""
    name = "_$x^2$ <b>\x1b"
    chart = lines(name, {name: [(0, 1.0), (1, 2.0)], "b": [(0, 1.0)]}, name, x_label=name)
    assert chart is not None
    root = ElementTree.fromstring(chart.inline())
    safe = "_$x^2$ <b>\\x1b"
    assert [part.text for part in root.iter(f"{SVG}title")] == [safe, "b"]
    words = [part.text for part in root.iter(f"{SVG}text")]
    assert {safe, f"{safe} ({safe})", "b"} <= set(words)
    assert root.attrib["aria-label"] == safe


def test_the_palette_of_plain_charts_is_the_light_one() -> None:
    assert {to_hex(colour) for colour in COLOURS} == {LIGHT[f"s{number}"].lower() for number in range(8)}


EXTREME = [0.0, 5e-324, 1e-200, 1.0, 1.0 + 2**-52, 2.0**62, 1e100, 1e308, -1e308, math.inf]
DRAWN: list[Callable[[float, float], Chart | None]] = [
    lambda one, other: lines("l", {"one": [(0, one)], "two": [(0, one), (1, other)]}, zero=True),
    lambda one, other: lines("l", {"one": [(abs(one), 1.0), (abs(other), 1.0)]}),
    lambda one, other: areas("a", {"one": [(0, one), (1, other)], "two": [(0, other), (1, one)]}),
    lambda one, other: bars("b", {"x": {"one": one, "two": other}}),
    lambda one, other: intervals("i", {"x": (one, other, one)}),
]


@pytest.mark.parametrize("kind", range(len(DRAWN)))
@pytest.mark.parametrize("value", EXTREME)
def test_any_number_can_be_drawn_or_left_out(value: float, kind: int) -> None:
    for other in (0.0, 1.0, value, -1e100):
        chart = DRAWN[kind](value, other)
        text = chart.inline() if chart else ""
        assert "nan" not in text
        assert "inf" not in text


def test_nothing_to_draw_is_nothing() -> None:
    assert (lines("a", {"one": []}), areas("a", {}), bars("a", {"x": {}}), intervals("a", {})) == (None,) * 4


def test_drawing_leaves_settings_of_matplotlib_alone() -> None:
    before = dict(matplotlib.rcParams)
    chart = lines("a", {"one": [(0, 1.0)]})
    assert chart is not None
    chart.inline()
    assert dict(matplotlib.rcParams) == before
