"""Writes the report from the results: `report.html`, `report.md`, `results.json`, `results.csv` and the main figure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tandem.benchmarks.ab.doubts import peak_text
from tandem.benchmarks.ab.measure import AXES, ITEMS, PARTS, TRENDS
from tandem.benchmarks.ab.raw import read_raw
from tandem.benchmarks.ab.results import REWARD, derive
from tandem.benchmarks.ab.summary import costs, recommendation, verdict_rows
from tandem.benchmarks.ab.tables import all_tables
from tandem.benchmarks.ab.verdict import (
    HELD,
    critic_bytes,
    finished,
    label,
    sentences,
    where,
)
from tandem.launch.views.charts import Chart, bars, intervals, lines, side_by_side
from tandem.launch.views.rendering import rendered
from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import write_text
from tandem.platform.system.redact import redacted_values
from tandem.platform.system.terminal import one_line, shown
from tandem.platform.system.text import human_bytes

MIB = 2**20
COMMAND = "python benchmarks/critic_vs_group.py"
HEADLINE = 4  # number of arms in the learning curves, taken from the first comparisons


def write(results: Mapping[str, Any], out: Path) -> Path:
    """Writes every form of the report into a folder; returns the path of the page."""
    save(results, out)
    write_text(out / "results.csv", as_csv(results))
    write_text(out / "report.md", as_markdown(results))
    write_text(out / "figure.svg", main_figure(results))
    write_text(out / "report.html", as_html(results))
    return out / "report.html"


def save(results: Mapping[str, Any], out: Path) -> None:
    """Writes `results.json`, the source of all other files."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "results.json", json.dumps(redacted_values(dict(results)), separators=(",", ":"), default=str) + "\n")


def rebuild(folder: Path) -> Path:
    """Rebuilds the report of a folder from the raw numbers in its `results.json`.

    Raises:
        ConfigError: the folder has no results, or they are inconsistent.
    """
    raw = read_raw(folder)
    try:
        return write({**raw, "derived": derive(raw)}, folder)
    except (ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"report={folder}: its results.json is inconsistent: {problem}") from error


def as_html(results: Mapping[str, Any]) -> str:
    """The report as a self-contained page."""
    charts = [(title, [chart for chart in drawn if chart]) for title, drawn in figures(results)]
    return rendered(
        Path(__file__).parent / "templates" / "comparison.html",
        title="Critic against group sampling",
        sentences=sentences(results),
        recommendation=recommendation(results),
        metric=results["derived"]["metrics"][0],
        axes=list(AXES.values()),
        verdicts=verdict_rows(results),
        costs=costs(results),
        first=_main_charts(results),
        sections=[(title, drawn) for title, drawn in charts if drawn],
        tables=all_tables(results),
        conditions=_conditions(results),
    )


def as_markdown(results: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    blocks = ["# What the critic costs and what it buys", f"Built by `{COMMAND}`."]
    first, *said, limits = map(_in_markdown, sentences(results))
    verdicts = [["at equal", *AXES], *([row.pair, *(cell.word for cell in row.cells)] for row in verdict_rows(results))]
    blocks += [
        first,
        f"**{_in_markdown(recommendation(results))}**",
        _markdown_table(verdicts),
        limits,
        "![](figure.svg)",
        *said,
    ]
    for title, note, rows in all_tables(results):
        blocks += [f"## {_in_markdown(title)}", _in_markdown(note), _markdown_table(rows)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def as_csv(results: Mapping[str, Any]) -> str:
    """A line per run: its status, its spending on each axis, and its values at the budget of each axis."""
    derived, text = results["derived"], io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    reached = [(metric, axis) for metric in derived["metrics"] for axis in AXES]
    head = ["arm", "seed", "status", "error", "startup_s", *(f"spent {axis}" for axis in AXES)]
    writer.writerow([*head, *(f"{metric} at equal {axis}" for metric, axis in reached)])
    ended = {(run["arm"], run["seed"]): run for run in derived["runs"]}
    for run in results["runs"]:
        row = [*map(_in_csv, (run["arm"], run["seed"], run["status"], run["error"] or "")), run["startup_s"] or ""]
        if result := ended.get((run["arm"], run["seed"])):
            row += [f"{result['spent'][axis]:.6g}" for axis in AXES]
            values = [result["at_budget"][metric][axis] for metric, axis in reached]
            row += ["" if value is None else f"{value:.6g}" for value in values]
        writer.writerow(row)
    return text.getvalue()


def main_figure(results: Mapping[str, Any]) -> str:
    """The figure of the README: learning at equal completions and at equal time, side by side with memory and step time."""
    return side_by_side(_main_charts(results))


def _main_charts(results: Mapping[str, Any]) -> list[Chart]:
    metric = results["derived"]["metrics"][0]
    charts = [_learning(results, metric, axis) for axis in ("completions", "seconds")] + [_times(results), _held(results)]
    return [chart for chart in charts if chart]


def figures(results: Mapping[str, Any]) -> list[tuple[str, list[Chart | None]]]:
    """All charts by section."""
    metrics = results["derived"]["metrics"]
    return [
        (f"Learning: {metrics[0]}, mean and range over seeds", [_learning(results, metrics[0], axis) for axis in AXES]),
        ("Reward, mean of three steps", [_learning(results, REWARD, axis) for axis in AXES]),
        ("Training, mean over seeds", [_trend(results, key) for key in TRENDS if key != REWARD]),
        ("Costs", [_times(results), _held(results), _flops(results), *_items(results)]),
        ("Sweeps, at equal completions", [_groups(results, metrics[0]), _critics(results, metrics[0])]),
        (
            f"Differences of {metrics[0]} at equal budgets, 95 % paired bootstrap",
            [_differences(results, metrics[0], axis) for axis in AXES],
        ),
    ]


def _learning(results: Mapping[str, Any], metric: str, axis: str) -> Chart | None:
    arms = results["derived"]["arms"]
    curves = {label(results, name): arms[name]["curves"][metric][axis] for name in _headline(results)}
    series = {name: [(x, y) for x, y, _, _ in rows] for name, rows in curves.items()}
    around = {name: [(x, low, high) for x, _, low, high in rows] for name, rows in curves.items()}
    return lines(metric, series, bands=around, x_label=AXES[axis])


def _trend(results: Mapping[str, Any], key: str) -> Chart | None:
    arms = results["derived"]["arms"]
    curves = {label(results, name): arms[name]["trend_curves"].get(key, []) for name in _headline(results)}
    return lines(key, curves, x_label="training step")


def _times(results: Mapping[str, Any]) -> Chart | None:
    rows = {
        label(results, name): {part: arm["costs"]["seconds"].get(part, 0.0) for part in (*PARTS, "rest")}
        for name, arm in finished(results).items()
    }
    used = [part for part in (*PARTS, "rest") if any(row[part] > 0.005 * sum(row.values()) for row in rows.values())]
    return bars(
        "time of a step", {name: {part: max(row[part], 0.0) for part in used} for name, row in rows.items()}, "s", 150
    )


def _held(results: Mapping[str, Any]) -> Chart | None:
    rows = {}
    for name, arm in finished(results).items():
        held = {role: sum(kinds[item] for item in (*HELD, "cache")) / MIB for role, kinds in arm["memory"].items()}
        rows[label(results, name)] = {role: size for role, size in held.items() if size > 0}
    return bars("tensors of each role", rows, "MiB", 150)


def _flops(results: Mapping[str, Any]) -> Chart | None:
    rows = {
        label(results, name): {phase: count / 1e9 for phase, count in arm["costs"]["flops"].items()}
        for name, arm in finished(results).items()
    }
    return bars("operations of a step", rows, "GFLOP", 150)


def _items(results: Mapping[str, Any]) -> list[Chart | None]:
    """Memory of each role, for the first arm with a critic and the first arm without."""
    arms, charts = finished(results), []
    wanted = [next((n for n in arms if ("critic" in arms[n]["memory"]) == has), None) for has in (True, False)]
    for name in (name for name in wanted if name is not None):
        rows = {
            role: {kind: max(kinds[kind], 0.0) / MIB for kind in (*ITEMS, "other")}
            for role, kinds in arms[name]["memory"].items()
        }
        charts.append(bars(f"{label(results, name)}: memory at the peak", rows, "MiB"))
    return charts


def _groups(results: Mapping[str, Any], metric: str) -> Chart | None:
    """Accuracy over group size by algorithm, for the arms that differ only in group size."""
    arms = finished(results)
    series: dict[str, list[tuple[float, float]]] = {}
    around: dict[str, list[tuple[float, float, float]]] = {}
    for arm in sorted(results["arms"], key=lambda arm: int(arm["group"])):
        result = arms[arm["name"]]["at_equal_completions"][metric] if arm["name"] in arms else None
        if arm["is_plain"] and result:
            series.setdefault(arm["algo"], []).append((arm["group"], result["value"]))
            around.setdefault(arm["algo"], []).append((arm["group"], result["low"], result["high"]))
    return lines(metric, series, bands=around, x_label="samples per prompt, G")


def _critics(results: Mapping[str, Any], metric: str) -> Chart | None:
    rows = {}
    for arm in results["arms"]:
        result = finished(results).get(arm["name"])
        value = result["at_equal_completions"][metric] if result and arm["critic"] else None
        if result and value:
            rows[f"{arm['label']}, {human_bytes(critic_bytes(result))}"] = (value["value"], value["low"], value["high"])
    return intervals(metric, rows, zero=False)


def _differences(results: Mapping[str, Any], metric: str, axis: str) -> Chart | None:
    rows = {
        f"{label(results, comparison['ours'])} - {label(results, comparison['theirs'])}": tuple(
            comparison["difference"][end] for end in ("value", "low", "high")
        )
        for comparison in results["derived"]["comparisons"]
        if comparison["metric"] == metric and comparison["axis"] == axis and comparison["difference"]
    }
    return intervals(f"at equal {AXES[axis]}", rows)


def _conditions(results: Mapping[str, Any]) -> dict[str, object]:
    """Machine, versions and settings."""
    machine = results["machine"]
    facts = {
        "devices": where(machine),
        "matrix product": peak_text(results),
        "first weights": results["model"]["digest"],
        **machine["versions"],
    }
    return {**facts, **results["settings"]}


def _headline(results: Mapping[str, Any]) -> list[str]:
    """Up to HEADLINE finished arms, those of the first comparisons first."""
    arms = finished(results)
    pairs = [
        name for comparison in results["derived"]["comparisons"] for name in (comparison["ours"], comparison["theirs"])
    ]
    return [name for name in dict.fromkeys([*pairs, *arms]) if name in arms][:HEADLINE]


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    text = ["| " + " | ".join(_in_markdown(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join([text[0], "|" + "---|" * len(rows[0]), *text[1:]])


def _in_markdown(value: object) -> str:
    """A value within a line of Markdown: no HTML, and no link or picture."""
    return escape(one_line(value), quote=False).replace("](", "]\\(")


def _in_csv(value: object) -> str:
    """A value for a cell; puts a quote before a value that a spreadsheet would read as a formula."""
    text = shown(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text
