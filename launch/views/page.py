"""The report of a run as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tandem.launch.views.charts import Shape, areas, bars, lines
from tandem.launch.views.markup import Markup, element, together
from tandem.launch.views.panels import Panel, panels
from tandem.launch.views.run import Run, changed, read
from tandem.launch.views.style import STYLE
from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.metrics import held_out, memory_key
from tandem.platform.loop.spans import PHASES
from tandem.platform.records.recorder import Record, SampleRow, read_metrics, read_samples, read_summary
from tandem.platform.system.files import write_text
from tandem.platform.system.text import human_bytes

GIB = 2**30
SAMPLES = 60  # number of samples shown, newest first
CHART = Shape(width=360, titled=False)
STEP = "training step"
PLACES = {"worst": "lowest reward", "best": "highest reward"}
UNTOLD = ("run.name", "run.dir")  # settings that every run has its own values of


def write_report(folder: Path) -> Path:
    """Writes the report of the run in a folder; returns its path.

    Raises:
        ConfigError: there is no run, one of its files has invalid content, or the report cannot be written.
    """
    target, text = folder / "report.html", render(folder)
    try:
        write_text(target, text)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror})") from error
    return target


def render(folder: Path) -> Markup:
    """The page as HTML.

    Raises:
        ConfigError: there is no run. FileError: one of its files has invalid content, or is a link.
    """
    run, steps = read(folder), read_metrics(folder)
    trained = [step for step in steps if "reward/mean" in step]
    settings = table([], [[key, value] for key, value in run.settings.items()])
    return page(
        run.name,
        _header(run),
        _tiles(run, steps, trained, read_summary(folder).total_s),
        _about(run),
        element("h2", "Training"),
        *_training(run, steps, trained),
        element("h2", "Samples"),
        *_samples(folder),
        element("details", element("summary", "All settings"), settings),
    )


def page(title: str, *body: object) -> Markup:
    """A self-contained page."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("title", title),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("style", Markup(STYLE)),
    )
    return together(Markup("<!doctype html>"), element("html", head, element("body", *body), lang="en"), "\n")


def table(head: Sequence[object], rows: Sequence[Sequence[object]], numbers: Sequence[object] = ()) -> Markup:
    """A table with an optional header row; the columns named in `numbers` are right-aligned."""
    looks = ["n" if name in numbers else None for name in head] or [None] * max(map(len, rows), default=0)

    def row(kind: str, cells: Sequence[object]) -> Markup:
        return element("tr", *(element(kind, cell, class_=look) for cell, look in zip(cells, looks, strict=True)))

    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("table", element("thead", row("th", head)) if head else None, body)


def _header(run: Run) -> Markup:
    """Name, status and, for a failed run, the error."""
    status = element("span", run.status, class_=f"badge {run.status}" if run.status in ("finished", "failed") else "badge")
    facts = {"algorithm": run.algo, "by": run.who, "started": run.when.replace("T", " "), "tags": run.tags}
    spans = [element("span", key, " ", element("b", value)) for key, value in facts.items() if value != ""]
    error = (run.error or "").strip().partition("\n")[0]
    return element(
        "header",
        element("div", element("h1", run.name), status, class_="head"),
        element("p", *spans, class_="facts"),
        element("p", error, class_="failed") if error else None,
    )


def _tiles(run: Run, steps: Sequence[Record], trained: Sequence[Record], total_s: float | None) -> Markup:
    """The main results of the run: last values, with the first values below."""
    measured = {key: metric for key, metric in held_out(_keys(steps)).items() if metric.measure == "greedy"}
    what = "held-out reward" if run.verifier is None else "held-out accuracy"
    tiles = [
        (_number(last), f"{what}, {metric.name}", first)
        for key, metric in measured.items()
        for first, last in [_ends(steps, key)]
    ]
    first, last = _ends(trained, "reward/mean")
    tiles.append((_number(last), "mean reward of the last step", first))
    shown = [
        element("div", element("b", value), element("span", what), _at_first(start), class_="tile")
        for value, what, start in tiles
    ]
    planned = run.settings.get("run.steps")
    of = f" of {planned}" if isinstance(planned, int) else ""
    rest = [
        (f"{run.step}{of}", "training steps"),
        (_duration(total_s), "total time"),
        ("-" if run.memory is None else human_bytes(run.memory), "peak memory, all roles"),
    ]
    return element(
        "div",
        *shown,
        *(element("div", element("b", value), element("span", what), class_="tile") for value, what in rest),
        class_="tiles",
    )


def _ends(steps: Sequence[Record], key: str) -> tuple[float | None, float | None]:
    """The first and the last value of a metric."""
    values = [step.get(key) for step in steps if key in step]
    return (values[0], values[-1]) if values else (None, None)


def _at_first(value: float | None) -> Markup:
    return element("span", f"{_number(value)} at first")


def _duration(seconds: float | None) -> str:
    """75 as "1 min 15 s"; a dash for an unknown or impossible time."""
    if seconds is None or not 0 <= seconds < 1e9:
        return "-"
    minutes, hours = int(seconds / 60), int(seconds / 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"


def _about(run: Run) -> Markup:
    """Model, data, reward, and the settings that differ from the defaults."""
    settings = run.settings
    task = f"embedded task {settings.get('task.name', '')}".strip()
    rewards = [key.partition(".functions.")[2] for key in settings if key.startswith("reward.functions.")]
    rewards += [str(settings[key]) for key in ("reward.function", "reward.model") if settings.get(key)]
    different = {key: value for key, value in changed(run).items() if key not in UNTOLD}
    files = [settings.get("data.eval"), *(value for key, value in settings.items() if key.startswith("data.eval_sets."))]
    facts = {
        "Model": settings.get("model.path")
        or f"embedded model, {settings.get('model.tiny.layers', '-')} layers of width "
        f"{settings.get('model.tiny.hidden_size', '-')}",
        "Training data": settings.get("data.train") or task,
        "Held-out data": ", ".join(str(file) for file in files if file) or ("none" if settings.get("data.train") else task),
        "Reward": ", ".join(rewards) or "-",
        "Verifier": run.verifier or ("none" if run.verifier is None else "-"),
    }
    chips = [element("code", f"{key}={value}") for key, value in different.items()]
    terms = [part for key, value in facts.items() for part in (element("dt", key), element("dd", value))]
    return element(
        "dl",
        *terms,
        element("dt", "Differs from the defaults"),
        element("dd", element("div", *chips, class_="chips") if chips else "nothing"),
        class_="about",
    )


def _training(run: Run, steps: Sequence[Record], trained: Sequence[Record]) -> list[Markup]:
    """All charts that the records have data for, and the reasons why others are missing."""
    if not trained and not held_out(_keys(steps)):
        return [element("p", "No step has ended.")]
    chosen = panels(run.settings)
    phases = {
        phase: [(step["step"] or 0, step.get(f"time/{phase}_s") or 0.0) for step in trained]
        for phase in PHASES
        if any(f"time/{phase}_s" in step for step in trained)
    }
    first, *others = [_lines(panel, trained) for panel in chosen.shown]
    accuracy = [_lines(panel, steps) for panel in _held_out(steps, run.verifier)]
    time, memory = (
        areas("Time per phase", phases, "s", STEP, CHART),
        bars("Memory per role", _memory(trained), "GiB", shape=CHART),
    )
    costs = [
        _figure("Time per phase", ["time/<phase>_s"], "seconds", time),
        _figure("Memory per role at the end", ["memory/<role>/<kind>_bytes"], "GiB", memory),
    ]
    drawn = [chart for chart in (first, *accuracy, *others, *costs) if chart]
    missing = [element("p", f"Not shown: {why}.", class_="facts") for why in chosen.reasons]
    return [element("div", *drawn, class_="charts"), *missing]


def _lines(panel: Panel, among: Sequence[Record]) -> Markup:
    """A panel over training steps; empty if the steps have no data for it."""
    points = {name: [(step["step"], step.get(key)) for step in among] for name, key in panel.curves.items()}
    known = {name: [(x, y) for x, y in curve if x is not None and y is not None] for name, curve in points.items()}
    keys = [key for name, key in panel.curves.items() if known[name]]
    drawn = lines(panel.title, known, panel.unit, panel.zero, x_label=STEP, shape=CHART)
    return _figure(panel.title, keys, panel.unit, drawn)


def _figure(title: str, keys: Sequence[str], unit: str, drawn: Markup) -> Markup:
    """A chart with a caption of title, metric names and unit; empty if `drawn` is empty."""
    if not drawn:
        return drawn
    names = element("span", ", ".join(keys), f" ({unit})" if unit else None, class_="key")
    return element("figure", element("figcaption", element("b", title), names), drawn)


def _held_out(steps: Sequence[Record], verifier: str | None) -> list[Panel]:
    """The panels of held-out sets: the verifier's score, and the training reward where it differs."""
    curves = {f"{metric.name} {metric.measure}": metric for metric in held_out(_keys(steps)).values()}
    measured = {curve: metric.key for curve, metric in curves.items() if metric.measure in ("greedy", "mean")}
    rewards = {curve: metric.key for curve, metric in curves.items() if metric.measure == "reward"}
    title = "Held-out reward (no verifier)" if verifier is None else "Held-out accuracy"
    accuracy = Panel(f"{title} ({verifier})" if verifier else title, measured)
    return [accuracy, *([Panel("Held-out reward", rewards)] if rewards else [])]


def _keys(steps: Sequence[Record]) -> dict[str, None]:
    """All metrics of the records, each once, in order of first appearance."""
    return dict.fromkeys(key for step in steps for key in step)


def _memory(trained: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Memory in GiB by role: weights, gradients, optimizer, and the rest of its process's peak."""
    rows: dict[str, dict[str, float]] = {}
    for key, value in (trained[-1] if trained else {}).items():
        if value and (role_and_kind := memory_key(key)):
            role, kind = role_and_kind
            rows.setdefault(role, {})[kind] = value / GIB
    for row in rows.values():
        if "peak" in row:
            row["other at peak"] = max(0.0, row.pop("peak") - sum(row.values()))
    return rows


def _samples(folder: Path) -> list[Markup]:
    """The newest samples as cards by step."""
    rows = read_samples(folder)
    if not rows:
        return [element("p", "No samples were kept (tracking.samples_every).")]
    parts = [
        element(
            "p",
            f"{min(len(rows), SAMPLES)} of {len(rows)} samples, newest steps first. Each step keeps the samples with the "
            "lowest and the highest reward, then alternates between low and high. No prompt gives a second sample before "
            "every prompt has given one.",
        )
    ]
    for step, group in groupby(rows[:SAMPLES], key=lambda pair: pair[0]):
        samples = [row for _, row in group]
        parts += [element("h3", f"Step {step}"), element("div", *_cards(samples), class_="samples")]
    return parts


def _cards(rows: Sequence[SampleRow]) -> list[Markup]:
    """The samples of a step; marks those with the lowest and highest reward, unless all rewards are equal."""
    scored = [row.reward for row in rows if row.reward is not None]
    least, most = min(scored, default=0.0), max(scored, default=0.0)
    return [
        _card(row, None if least == most else "worst" if row.reward == least else "best" if row.reward == most else None)
        for row in rows
    ]


def _card(row: SampleRow, place: str | None) -> Markup:
    facts: dict[str, Any] = {
        "answer": row.answer,
        **{name: _number(value) for name, value in row.parts.items()},
        "advantage": _number(row.advantage),
        "log-prob gap": _number(row.logprob_gap),
        "tokens": row.response_tokens,
        "end": row.problem or row.stop,
    }
    return element(
        "article",
        element("p", f"reward {_number(row.reward)}", element("span", PLACES[place], class_=place) if place else None),
        element("pre", row.prompt),
        element("pre", row.response),
        element("div", *(element("span", f"{name} ", element("b", value)) for name, value in facts.items()), class_="meta"),
        class_="sample",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
