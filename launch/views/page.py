"""The report of a run as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from tandem.launch.views.charts import Chart, Shape, areas, bars, lines
from tandem.launch.views.panels import Panel, panels
from tandem.launch.views.rendering import TEMPLATES, rendered
from tandem.launch.views.run import Run, changed, read
from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.metrics import held_out, memory_key
from tandem.platform.loop.spans import PHASES
from tandem.platform.records.recorder import Record, SampleRow, read_metrics, read_samples, read_summary
from tandem.platform.system.files import write_text
from tandem.platform.system.text import human_bytes

GIB = 2**30
SAMPLES = 60  # number of samples shown, newest first
SHAPE = Shape(width=360, titled=False)
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


def render(folder: Path) -> str:
    """The page as HTML.

    Raises:
        ConfigError: there is no run. FileError: one of its files has invalid content, or is a link.
    """
    run, steps, rows = read(folder), read_metrics(folder), read_samples(folder)
    trained = [step for step in steps if "reward/mean" in step]
    origin = {"algorithm": run.algo, "by": run.who, "started": run.when.replace("T", " "), "tags": run.tags}
    has_steps = bool(trained or held_out(_keys(steps)))
    return rendered(
        TEMPLATES / "run.html",
        title=run.name,
        run=run,
        origin={key: value for key, value in origin.items() if value != ""},
        error=(run.error or "").strip().partition("\n")[0],
        tiles=_tiles(run, steps, trained, read_summary(folder).total_s),
        about=_about(run),
        changed={key: value for key, value in changed(run).items() if key not in UNTOLD},
        figures=_figures(run, steps, trained) if has_steps else None,
        missing=panels(run.settings).reasons,
        samples=[(step, _cards([row for _, row in group])) for step, group in groupby(rows[:SAMPLES], key=itemgetter(0))],
        samples_shown=min(len(rows), SAMPLES),
        samples_kept=len(rows),
        places=PLACES,
    )


@dataclass(frozen=True)
class Tile:
    """A main result, with its value at the beginning of the run if that can be compared."""

    value: str
    what: str
    first: str = ""


def _tiles(run: Run, steps: Sequence[Record], trained: Sequence[Record], total_s: float | None) -> list[Tile]:
    """The main results of the run: the last values."""
    measured = {key: metric for key, metric in held_out(_keys(steps)).items() if metric.measure == "greedy"}
    what = "held-out reward" if run.verifier is None else "held-out accuracy"
    results = [(f"{what}, {metric.name}", *_ends(steps, key)) for key, metric in measured.items()]
    results.append(("mean reward of the last step", *_ends(trained, "reward/mean")))
    planned = run.settings.get("run.steps")
    of = f" of {planned}" if isinstance(planned, int) else ""
    return [
        *(Tile(_number(last), name, _number(first)) for name, first, last in results),
        Tile(f"{run.step}{of}", "training steps"),
        Tile(_duration(total_s), "total time"),
        Tile("-" if run.memory is None else human_bytes(run.memory), "peak memory, all roles"),
    ]


def _ends(steps: Sequence[Record], key: str) -> tuple[float | None, float | None]:
    """The first and the last value of a metric."""
    values = [step.get(key) for step in steps if key in step]
    return (values[0], values[-1]) if values else (None, None)


def _duration(seconds: float | None) -> str:
    """75 as "1 min 15 s"; a dash for an unknown or impossible time."""
    if seconds is None or not 0 <= seconds < 1e9:
        return "-"
    minutes, hours = int(seconds / 60), int(seconds / 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.0f} s"


def _about(run: Run) -> dict[str, object]:
    """Model, data and reward."""
    settings = run.settings
    task = f"embedded task {settings.get('task.name', '')}".strip()
    rewards = [key.partition(".functions.")[2] for key in settings if key.startswith("reward.functions.")]
    rewards += [str(settings[key]) for key in ("reward.function", "reward.model") if settings.get(key)]
    files = [settings.get("data.eval"), *(value for key, value in settings.items() if key.startswith("data.eval_sets."))]
    return {
        "Model": settings.get("model.path")
        or f"embedded model, {settings.get('model.tiny.layers', '-')} layers of width "
        f"{settings.get('model.tiny.hidden_size', '-')}",
        "Training data": settings.get("data.train") or task,
        "Held-out data": ", ".join(str(file) for file in files if file) or ("none" if settings.get("data.train") else task),
        "Reward": ", ".join(rewards) or "-",
        "Verifier": run.verifier or ("none" if run.verifier is None else "-"),
    }


@dataclass(frozen=True)
class Captioned:
    """A chart with the names of its metrics and their unit."""

    title: str
    keys: Sequence[str]
    unit: str
    chart: Chart


def _figures(run: Run, steps: Sequence[Record], trained: Sequence[Record]) -> list[Captioned]:
    """All charts that the records have data for."""
    phases = {
        phase: [(step["step"] or 0, step.get(f"time/{phase}_s") or 0.0) for step in trained]
        for phase in PHASES
        if any(f"time/{phase}_s" in step for step in trained)
    }
    first, *others = [_lines(panel, trained) for panel in panels(run.settings).shown]
    accuracy = [_lines(panel, steps) for panel in _held_out(steps, run.verifier)]
    time = areas("Time per phase", phases, "s", STEP, SHAPE)
    memory = bars("Memory per role at the end", _memory(trained), "GiB", shape=SHAPE)
    costs = [
        Captioned(time.title, ["time/<phase>_s"], "seconds", time) if time else None,
        Captioned(memory.title, ["memory/<role>/<kind>_bytes"], "GiB", memory) if memory else None,
    ]
    return [figure for figure in (first, *accuracy, *others, *costs) if figure]


def _lines(panel: Panel, among: Sequence[Record]) -> Captioned | None:
    """A panel over training steps; None if the steps have no data for it."""
    points = {name: [(step["step"], step.get(key)) for step in among] for name, key in panel.curves.items()}
    known = {name: [(x, y) for x, y in curve if x is not None and y is not None] for name, curve in points.items()}
    keys = [key for name, key in panel.curves.items() if known[name]]
    chart = lines(panel.title, known, panel.unit, panel.zero, x_label=STEP, shape=SHAPE)
    return Captioned(panel.title, keys, panel.unit, chart) if chart else None


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


@dataclass(frozen=True)
class Card:
    """A sample as it is shown. Its place is `best` or `worst` of its step, or None."""

    reward: str
    place: str | None
    prompt: str
    response: str
    facts: Mapping[str, object]


def _cards(rows: Sequence[SampleRow]) -> list[Card]:
    """The samples of a step; marks those with the lowest and highest reward, unless all rewards are equal."""
    scored = [row.reward for row in rows if row.reward is not None]
    least, most = min(scored, default=0.0), max(scored, default=0.0)
    return [
        _card(row, None if least == most else "worst" if row.reward == least else "best" if row.reward == most else None)
        for row in rows
    ]


def _card(row: SampleRow, place: str | None) -> Card:
    facts = {
        "answer": row.answer,
        **{name: _number(value) for name, value in row.parts.items()},
        "advantage": _number(row.advantage),
        "log-prob gap": _number(row.logprob_gap),
        "tokens": row.response_tokens,
        "end": row.problem or row.stop,
    }
    return Card(_number(row.reward), place, row.prompt, row.response, facts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
