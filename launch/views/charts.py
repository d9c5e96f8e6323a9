"""Charts as SVG text, for reports that can be read without network access or a library.

Series differ in colour (the palette of Okabe and Ito, which colour-blind readers can distinguish) and in dash, so they also
differ in black-and-white print. Colours are attributes, so a chart is complete by itself. Classes let a page's style
replace them, for example in dark mode: `t` text, `g` grid, `e` edge between areas, `z` zero line, `s0` to `s7` and `f0` to
`f7` lines and areas of the series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.launch.views.markup import Markup, element

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "4 4", "1 3", "10 4", "3 1")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 240, 58, 12, 30, 34
LETTER = 6.2  # upper bound of the mean letter width in a legend, in pixels
Points = Sequence[tuple[float, float]]
LARGEST = 1e100  # largest value drawn: sums and spans of such values are finite
SMALLEST = 1e-100  # smallest span that gets more than one tick
Mark = Callable[[int, float, float], Markup]
"""(number of a series, x, y) -> its mark in the legend."""


@dataclass(frozen=True)
class Shape:
    """The width of a chart and whether it has a title inside. Without a title, the top margin is smaller and the legend
    wider.
    """

    width: int = WIDTH
    titled: bool = True

    @property
    def top(self) -> int:
        """Pixels above the frame."""
        return TOP if self.titled else 10

    @property
    def legend(self) -> tuple[int, int]:
        """The left edge of the legend, and the width of one of its two columns."""
        left = LEFT if self.titled else 10
        return left, (self.width - left - RIGHT) // 2


WIDE = Shape()


def lines(
    title: str,
    series: Mapping[str, Points],
    unit: str = "",
    zero: bool = False,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    x_label: str = "",
    shape: Shape = WIDE,
) -> Markup:
    """Lines over training steps, or over the axis of `x_label`; `zero` includes 0 in the y axis. Empty without data.

    Args:
        bands: points (x, low, high) of bands around the lines of these names.
    """
    drawn = {name: [point for point in points if _can_be_drawn(*point)] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return Markup()
    xs = [x for points in drawn.values() for x, _ in points]
    around = {
        name: [point for point in band if _can_be_drawn(*point)] for name, band in (bands or {}).items() if name in drawn
    }
    ys = [y for points in drawn.values() for _, y in points] + ([0.0] if zero else [])
    ys += [y for band in around.values() for _, low, high in band for y in (low, high)]
    frame = _Frame(min(xs), max(xs), min(ys), max(ys), shape)
    body = [_band(frame, around[name], number) for number, name in enumerate(drawn) if name in around]
    for number, (name, points) in enumerate(drawn.items()):
        body += _line(frame, name, points, number)
    return _figure(title, unit, frame, body, list(drawn) if len(drawn) > 1 else [], _line_mark, x_label)


def _line(frame: _Frame, name: str, points: Points, number: int) -> list[Markup]:
    """A line; a single point also gets a dot."""
    colour, tip = COLOURS[number % 8], element("title", name)
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    look = {"fill": "none", "stroke_width": 1.6, "stroke": colour, "stroke_dasharray": DASHES[number % 8]}
    look["class_"] = f"s{number % 8}"
    drawn = [element("polyline", tip, points=path, **look)]
    if len(points) == 1:
        [(x, y)] = points
        drawn.append(
            element("circle", cx=f"{frame.x(x):.1f}", cy=f"{frame.y(y):.1f}", r=3, fill=colour, class_=f"f{number % 8}")
        )
    return drawn


def _band(frame: _Frame, band: Sequence[tuple[float, float, float]], number: int) -> Markup:
    there = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in band]
    back = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(band)]
    look = {"fill": COLOURS[number % 8], "class_": f"f{number % 8}", "fill_opacity": 0.13}
    return element("polygon", points=" ".join(there + back), **look)


def intervals(title: str, rows: Mapping[str, tuple[float, float, float]], unit: str = "", zero: bool = True) -> Markup:
    """Values with intervals, (value, low, high), one row each; `zero` draws a line at 0."""
    rows = {name: row for name, row in rows.items() if _can_be_drawn(*row)}
    if not rows:
        return Markup()
    left, step = max(190, min(250, round(max(map(len, rows)) * LETTER) + 14)), 24
    ends = [end for row in rows.values() for end in row] + ([0.0] if zero else [])
    scale = ticks(min(ends), max(ends), 4)
    low, high = min(scale[0], *ends), max(scale[-1], *ends)
    width = (WIDTH - left - 24) / (high - low if high - low > SMALLEST else 1.0)
    bottom = TOP + step * len(rows)
    body = [_title(title, unit)]
    for tick in scale:
        x = left + (tick - low) * width
        is_zero = zero and tick == 0
        look = {"stroke": "#000", "stroke_width": 1.2, "class_": "z"} if is_zero else {"stroke": "#ddd", "class_": "g"}
        body.append(element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP, y2=bottom, **look))
        body.append(_text(x, bottom + 15, _short(tick), 11, anchor="middle"))
    for number, (name, row) in enumerate(rows.items()):
        y, (value, least, most) = TOP + step * number + 12, row
        tip = element("title", f"{name}: {value:.4g} [{least:.4g}, {most:.4g}] {unit}")
        middle, start, end = (f"{left + (place - low) * width:.1f}" for place in row)
        body.append(_text(left - 8, y + 4, name, 11, anchor="end"))
        body.append(element("line", tip, x1=start, x2=end, y1=y, y2=y, stroke=COLOURS[0], stroke_width=2.4, class_="s0"))
        body.append(element("circle", tip, cx=middle, cy=y, r=4, fill=COLOURS[0], class_="f0"))
    return _svg(body, bottom + 24, title)


def areas(title: str, series: Mapping[str, Points], unit: str = "", x_label: str = "", shape: Shape = WIDE) -> Markup:
    """Stacked areas over training steps; all series must have the same steps."""
    if not series or not any(series.values()):
        return Markup()
    steps = [x for x, _ in next(iter(series.values()))]
    below = [0.0] * len(steps)
    layers = []
    for name, points in series.items():
        above = [low + (y if _can_be_drawn(y) else 0.0) for low, (_, y) in zip(below, points, strict=True)]
        layers.append((name, below, above))
        below = above
    frame = _Frame(min(steps), max(steps), 0.0, max(below), shape)
    body = []
    for number, (name, low, high) in enumerate(layers):
        there = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(steps, high, strict=True)]
        back = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(reversed(steps), reversed(low), strict=True)]
        look = {"fill": COLOURS[number % 8], "fill_opacity": 0.75, "stroke": "#fff", "stroke_width": 0.6}
        look["class_"] = f"f{number % 8} e"
        body.append(element("polygon", element("title", name), points=" ".join(there + back), **look))
    return _figure(title, unit, frame, body, [name for name, _, _ in layers], _area_mark, x_label)


def bars(
    title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "", left: int = 90, shape: Shape = WIDE
) -> Markup:
    """Horizontal stacked bars, one per row; row names have `left` pixels."""
    rows = {
        name: {part: value for part, value in row.items() if _can_be_drawn(value) and value >= 0}
        for name, row in rows.items()
    }
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    most = max((sum(row.values()) for row in rows.values()), default=0.0)
    if most < SMALLEST:
        return Markup()
    step = 26
    bottom = shape.top + step * len(rows)
    scale = (shape.width - left - 70) / most
    body = [_title(title, unit)] if shape.titled else []
    for number, (name, row) in enumerate(rows.items()):
        x, y = float(left), shape.top + step * number
        body.append(_text(left - 6, y + 14, name, 11, anchor="end"))
        for part, value in row.items():
            tip, width, colour = (
                element("title", f"{name} {part}: {value:.4g} {unit}"),
                value * scale,
                parts.index(part) % 8,
            )
            look = {"height": 18, "fill": COLOURS[colour], "stroke": "#fff", "class_": f"f{colour} e"}
            body.append(element("rect", tip, x=f"{x:.1f}", y=y, width=f"{width:.1f}", **look))
            x += width
        body.append(_text(x + 4, y + 14, f"{sum(row.values()):.3g}", 11))
    legend, height = _legend(parts, bottom + 14, _area_mark, shape)
    return _svg([*body, *legend], bottom + 14 + height, title, shape)


def _can_be_drawn(*values: float) -> bool:
    return all(math.isfinite(value) and abs(value) <= LARGEST for value in values)


class _Frame:
    """Maps values to pixels."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float, shape: Shape = WIDE) -> None:
        self.shape, self.right = shape, shape.width - RIGHT
        self.xs = [value for value in ticks(x0, x1) if value == int(value)]  # steps are integers
        self.ys = ticks(y0, y1)
        self.x0, self.x1 = x0, x1 if x1 > x0 else x0 + max(1, abs(x0) / 100)
        self.y0, self.y1 = min(y0, self.ys[0]), max(y1, self.ys[-1])
        if not self.y1 - self.y0 > SMALLEST:
            wide = max(0.5, abs(self.y0) / 100)
            self.y0, self.y1 = self.y0 - wide, self.y1 + wide

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (self.right - LEFT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - self.shape.top - BOTTOM)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that span low to high."""
    if not high - low > SMALLEST:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    return [round(number * step, 12) for number in range(first, math.ceil(high / step - 1e-9) + 1)]


def _figure(
    title: str, unit: str, frame: _Frame, body: list[Markup], legend: list[str], mark: Mark, x_label: str = ""
) -> Markup:
    shape = frame.shape
    head = [_title(title, unit)] if shape.titled else []
    for value in frame.ys:
        y = f"{frame.y(value):.1f}"
        head.append(element("line", x1=LEFT, x2=frame.right, y1=y, y2=y, stroke="#ddd", class_="g"))
        head.append(_text(LEFT - 6, frame.y(value) + 4, f"{value:.4g}", 11, anchor="end"))
    for value in frame.xs:
        if frame.x0 <= value <= frame.x1:
            head.append(_text(frame.x(value), HEIGHT - BOTTOM + 16, _short(value), 11, anchor="middle"))
    if x_label:
        head.append(_text((LEFT + frame.right) / 2, HEIGHT - 3, x_label, 11, anchor="middle"))
    top = HEIGHT + (8 if x_label else -6)
    keys, height = _legend(legend, top, mark, shape)
    return _svg([*head, *body, *keys], top + 6 + height, title, shape)


def _short(value: float) -> str:
    return f"{value / 1000:.4g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def _legend(names: Sequence[str], top: float, mark: Mark, shape: Shape) -> tuple[list[Markup], int]:
    """The legend and its height; has one column if a name is too long for two."""
    left, width = shape.legend
    columns = 2 if max(map(len, names), default=0) * LETTER <= width - 27 else 1
    body = []
    for number, name in enumerate(names):
        x, y = left + number % columns * width, top + number // columns * 16 + 8
        body += [mark(number, x, y), _text(x + 27, y, name, 11)]
    return body, 16 * math.ceil(len(names) / columns)


def _line_mark(number: int, x: float, y: float) -> Markup:
    look = {"stroke": COLOURS[number % 8], "stroke_width": 2.5, "stroke_dasharray": DASHES[number % 8]}
    look["class_"] = f"s{number % 8}"
    return element("line", x1=x, x2=x + 22, y1=y - 4, y2=y - 4, **look)


def _area_mark(number: int, x: float, y: float) -> Markup:
    return element("rect", x=x + 6, y=y - 9, width=11, height=11, fill=COLOURS[number % 8], class_=f"f{number % 8}")


def _title(title: str, unit: str) -> Markup:
    return _text(LEFT - 46, 18, title + (f" ({unit})" if unit else ""), 13, weight="600")


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", weight: str = "400") -> Markup:
    look = {"font_size": size, "text_anchor": anchor, "font_weight": weight, "class_": "t"}
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **look)


def _svg(body: Sequence[Markup], height: float, label: str, shape: Shape = WIDE) -> Markup:
    box = f"0 0 {shape.width} {height:.0f}"
    return element("svg", *body, viewBox=box, role="img", aria_label=label, xmlns="http://www.w3.org/2000/svg")
