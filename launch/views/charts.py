"""Charts, drawn by matplotlib as SVG.

Series differ in colour (the palette of Okabe and Ito, which colour-blind readers can distinguish) and in dash, so they also
differ in black-and-white print. A drawing by itself is complete. In a page, every colour is a variable of the page's
palette, so the chart follows light and dark mode.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tandem.launch.views.palette import COLOURS, LIGHT
from tandem.platform.system.terminal import shown

DASHES: Any = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 3)), (0, (1, 2)), (0, (8, 3)), (0, (2, 1)))
LEFT, RIGHT, TOP, BOTTOM, ROW = 58, 12, 30, 34, 16  # margins around the axes, and a row of the legend
LETTER = 6.4  # upper bound of the mean letter width at SIZE
SIZE = 11  # of letters
ROUND = (1, 2, 2.5, 5, 10)  # distances between ticks, times a power of ten
Points = Sequence[tuple[float, float]]
Look = dict[str, Any]  # keyword arguments of matplotlib
LARGEST = 1e100  # largest value drawn: sums and spans of such values are finite
SMALLEST = 1e-100  # smallest sum that is drawn as a bar

SVG, XLINK, TIP = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "tip: "
PLAIN: Any = {
    "font.size": SIZE,
    "text.color": LIGHT["text"],
    "text.parse_math": False,
    "axes.labelcolor": LIGHT["text"],
    "axes.axisbelow": True,
    "axes.edgecolor": LIGHT["line"],
    "axes.formatter.useoffset": False,
    "xtick.labelcolor": LIGHT["text"],
    "ytick.labelcolor": LIGHT["text"],
    "xtick.bottom": False,
    "ytick.left": False,
    "grid.color": LIGHT["line"],
    "path.simplify_threshold": 0.5,  # of a pixel
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tandem",  # the same drawing has the same names
}


@dataclass(frozen=True)
class Shape:
    """The width of a chart in pixels, and whether its title is inside. Without a title, the top margin is smaller and the
    legend wider.
    """

    width: int = 460
    titled: bool = True

    @property
    def top(self) -> int:
        """Pixels above the axes."""
        return TOP if self.titled else 10


@dataclass(frozen=True)
class Chart:
    """A chart that is not drawn yet. `paint` draws it on a figure of `width` x `height` pixels."""

    title: str
    width: int
    height: int
    paint: Callable[[FigureBase], None]

    def inline(self) -> Markup:
        """The chart for a page that has the palette's variables."""
        return _inline(_drawn(self.width, self.height, self.paint), self.title)


def side_by_side(charts: Sequence[Chart], columns: int = 2) -> str:
    """Charts in a grid, as one complete SVG file."""
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    heights = [max(chart.height for chart in row) for row in rows]
    width, height = columns * max(chart.width for chart in charts), sum(heights)

    def paint(figure: FigureBase) -> None:
        places = figure.add_gridspec(
            len(rows), columns, left=0, bottom=0, right=1, top=1, wspace=0, hspace=0, height_ratios=heights
        )
        for y, row in enumerate(rows):
            for x, chart in enumerate(row):
                place = figure.add_subfigure(places[y, x])
                place.set_facecolor("none")
                chart.paint(place)

    return _drawn(width, height, paint, background="white")


def lines(
    title: str,
    series: Mapping[str, Points],
    unit: str = "",
    zero: bool = False,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    x_label: str = "",
    shape: Shape = Shape(),
) -> Chart | None:
    """Lines over training steps, or over the axis of `x_label`; `zero` includes 0 in the y axis. None without data.

    Args:
        bands: points (x, low, high) of bands around the lines of these names.
    """
    curves = {name: [point for point in points if _can_be_drawn(*point)] for name, points in series.items()}
    numbers = {name: number % 8 for number, name in enumerate(series)}  # a series without data keeps its colour
    curves = {name: points for name, points in curves.items() if points}
    around = {name: [point for point in band if _can_be_drawn(*point)] for name, band in (bands or {}).items()}
    if not curves:
        return None

    def draw(axes: Axes) -> list[Artist]:
        handles: list[Artist] = []
        for name, points in curves.items():
            number = numbers[name]
            colour = COLOURS[number]
            if band := around.get(name):
                x, low, high = zip(*band, strict=True)
                axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
            dot = "o" if len(points) == 1 else ""
            style: Look = {
                "color": colour,
                "linestyle": DASHES[number],
                "linewidth": 1.6,
                "marker": dot,
                "markersize": 6,
            }
            handles += axes.plot(*zip(*points, strict=True), **style, gid=_tip(name))
        axes.grid(axis="y")
        axes.margins(x=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        if zero:
            axes.set_ylim(*_with_zero(*axes.get_ylim()))
        return handles

    return _chart(title, unit, shape, draw, list(curves) if len(curves) > 1 else [], x_label)


def areas(
    title: str, series: Mapping[str, Points], unit: str = "", x_label: str = "", shape: Shape = Shape()
) -> Chart | None:
    """Stacked areas over training steps; all series must have the same steps. None without data."""
    if not any(series.values()):
        return None
    steps = [x for x, _ in next(iter(series.values()))]
    heights = [[y if _can_be_drawn(y) else 0.0 for _, y in points] for points in series.values()]

    def draw(axes: Axes) -> list[Artist]:
        look: Look = {"alpha": 0.75, "edgecolor": LIGHT["card"], "linewidth": 0.6}
        drawn = axes.stackplot(steps, heights, colors=COLOURS, **look)
        for name, area in zip(series, drawn, strict=True):
            area.set_gid(_tip(name))
        axes.grid(axis="y")
        axes.margins(x=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        return _patches(len(series))

    return _chart(title, unit, shape, draw, list(series), x_label)


def bars(
    title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "", left: int = 90, shape: Shape = Shape()
) -> Chart | None:
    """Horizontal stacked bars, one per row; row names have `left` pixels. None if all are zero."""
    shares = {
        name: {part: value for part, value in row.items() if _can_be_drawn(value) and value >= 0}
        for name, row in rows.items()
    }
    parts = list(dict.fromkeys(part for row in shares.values() for part in row))
    sums = [sum(row.values()) for row in shares.values()]
    if max(sums, default=0.0) < SMALLEST:
        return None

    def draw(axes: Axes) -> list[Artist]:
        ends = [0.0] * len(shares)
        for number, part in enumerate(parts):
            widths = [row.get(part, 0.0) for row in shares.values()]
            look: Look = {
                "height": 0.7,
                "color": COLOURS[number % 8],
                "edgecolor": LIGHT["card"],
                "linewidth": 0.6,
            }
            for name, width, bar in zip(
                shares, widths, axes.barh(range(len(shares)), widths, left=ends, **look), strict=True
            ):
                bar.set_gid(_tip(f"{name} {part}: {width:.4g} {unit}"))
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for y, total in enumerate(sums):
            axes.annotate(f"{total:.3g}", (total, y), (4, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, max(sums) * 1.2)
        axes.set_xticks([])
        _name_rows(axes, list(shares))
        return _patches(len(parts))

    return _chart(title, unit, shape, draw, parts, left=left, rows=len(shares))


def intervals(
    title: str, rows: Mapping[str, tuple[float, float, float]], unit: str = "", zero: bool = True
) -> Chart | None:
    """Values with intervals, (value, low, high), one row each; `zero` draws a line at 0. None without data."""
    known = {name: row for name, row in rows.items() if _can_be_drawn(*row)}
    if not known:
        return None

    def draw(axes: Axes) -> list[Artist]:
        for y, (name, (value, low, high)) in enumerate(known.items()):
            tip = _tip(f"{name}: {value:.4g} [{low:.4g}, {high:.4g}] {unit}")
            axes.plot([low, high], [y, y], color=COLOURS[0], linewidth=2.4, gid=tip)
            axes.plot([value], [y], color=COLOURS[0], marker="o", markersize=8, gid=tip)
        axes.grid(axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
        if zero:
            axes.axvline(0, color=LIGHT["text"], linewidth=1.2)
        _name_rows(axes, list(known))
        return []

    left = max(190, min(250, round(max(map(len, known)) * LETTER) + 14))
    return _chart(title, unit, Shape(), draw, [], left=left, rows=len(known))


def _chart(
    title: str,
    unit: str,
    shape: Shape,
    draw: Callable[[Axes], list[Artist]],
    names: Sequence[str],
    x_label: str = "",
    left: int = LEFT,
    rows: int = 0,
) -> Chart:
    """A chart of one axes, which `draw` draws on; it returns the marks of the legend.

    The axes are 24 pixels high for each of `rows`; without rows, the chart without its legend is 240 pixels high.
    """
    inner = 24 * rows if rows else 240 - shape.top - BOTTOM
    edge = left if shape.titled and not rows else 10
    columns = 2 if max(map(len, names), default=0) * LETTER <= (shape.width - edge - RIGHT) / 2 - 34 else 1
    bottom = 20 + 18 * bool(x_label)
    height = shape.top + inner + bottom + ROW * math.ceil(len(names) / columns) + 6

    def paint(figure: FigureBase) -> None:
        box = (
            left / shape.width,
            1 - (shape.top + inner) / height,
            (shape.width - left - RIGHT) / shape.width,
            inner / height,
        )
        axes = figure.add_axes(box)
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        handles = draw(axes)
        axes.set_xlabel(shown(x_label), labelpad=4)
        if shape.titled:
            text = shown(f"{title} ({unit})" if unit else title)
            figure.text(12 / shape.width, 1 - 18 / height, text, size=13, weight="bold", va="baseline")
        if names:
            place = (edge / shape.width, 1 - (shape.top + inner + bottom) / height)
            look: Look = {
                "borderpad": 0,
                "borderaxespad": 0,
                "labelspacing": 0.3,
                "handlelength": 2,
                "handletextpad": 0.5,
            }
            look |= {"columnspacing": 1.5, "fontsize": SIZE, "frameon": False, "ncols": columns}
            figure.legend(handles, list(map(shown, names)), loc="upper left", bbox_to_anchor=place, **look)

    return Chart(title, shape.width, height, paint)


def _name_rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), list(map(shown, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)


def _patches(count: int) -> list[Artist]:
    return [Patch(color=COLOURS[number % 8], linewidth=0) for number in range(count)]


def _with_zero(low: float, high: float) -> tuple[float, float]:
    return min(low, 0.0), max(high, 0.0)


def _can_be_drawn(*values: float) -> bool:
    return all(math.isfinite(value) and abs(value) <= LARGEST for value in values)


def _short(value: float, _: object = None) -> str:
    return f"{value / 1000:.4g}k" if 10_000 <= abs(value) < 1e7 else f"{value:.4g}"


def _tip(text: str) -> str:
    """The name of a drawn part that gets this text as its tooltip."""
    return TIP + shown(text)


def _drawn(width: int, height: int, paint: Callable[[FigureBase], None], background: str = "none") -> str:
    """What is painted, as an SVG file."""
    text = io.StringIO()
    with matplotlib.rc_context(PLAIN):
        figure = Figure((width / 72, height / 72), dpi=72, facecolor=background)
        paint(figure)
        FigureCanvasSVG(figure).print_svg(text, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()


def _inline(drawing: str, label: str) -> Markup:
    """A drawing as part of a page: colours by the palette, tooltips, and no size of its own."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(drawing)
    for style in root.findall(f"{{{SVG}}}defs/{{{SVG}}}style/.."):
        root.remove(style)
    for part in root.iter():
        if "style" in part.attrib:
            part.set("style", _by_palette(part.attrib["style"]))
        if part.get("id", "").startswith(TIP):
            tip = ElementTree.Element(f"{{{SVG}}}title")
            tip.text = part.attrib["id"].removeprefix(TIP)
            part.insert(0, tip)
        if part.tag == f"{{{SVG}}}g":
            part.attrib.pop("id", None)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": shown(label)}
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # written by matplotlib, which escapes what it is given


_VARIABLES = {
    **{LIGHT[name].lower(): f"var(--{name})" for name in ("text", "line", "card")},
    **{colour.lower(): f"var(--s{number})" for number, colour in enumerate(COLOURS)},
}


def _by_palette(style: str) -> str:
    """A style with variables in place of colours; the font is that of the page."""
    rules = dict(rule.split(": ", 1) for rule in style.split("; "))
    rules.pop("font-family", None)
    return "; ".join(f"{name}: {_VARIABLES.get(value, value)}" for name, value in rules.items())
