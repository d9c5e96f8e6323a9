"""A run as one page that needs nothing else: `python launch/report.py outputs/NAME` writes `report.html` there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.launch.charts import areas, bars, lines
from tandem.launch.command import as_called, command
from tandem.launch.markup import Markup, element, together
from tandem.launch.runs import Run, read
from tandem.platform.config import ConfigError
from tandem.platform.files import write_text
from tandem.platform.records import Record, memory_key, read_metrics, read_samples
from tandem.platform.spans import PHASES
from tandem.platform.terminal import say

USAGE = "usage: python launch/report.py outputs/NAME\n\nWrites report.html into the folder of the run."
GIB = 2**30
SAMPLES = 60  # in the table, the newest
STYLE = """
:root { color-scheme: light; font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; max-width: 1480px; padding: 20px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 8px; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 28px; color: #444; margin: 0; }
.facts b { color: #1a1a1a; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 14px; }
.charts svg { width: 100%; border: 1px solid #e2e2e2; border-radius: 4px; background: #fff; font-family: inherit; }
table { border-collapse: collapse; width: 100%; font-size: 13px; } .wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 5px 9px; border-bottom: 1px solid #e6e6e6; }
th { background: #f4f4f4; position: sticky; top: 0; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.4 ui-monospace, monospace; max-width: 460px; }
.failed { color: #b00020; } details { margin-top: 10px; } summary { cursor: pointer; }
@media print { .charts { grid-template-columns: 1fr 1fr; } svg, tr { break-inside: avoid; } }
"""


@command("report", USAGE)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 written, 2 not)."""
    if len(arguments) != 1:
        say(as_called(USAGE))
        return 2
    say(write(Path(arguments[0])))
    return 0


def write(folder: Path) -> Path:
    """Writes the report of the run in a folder; returns its path.

    Raises:
        ConfigError: there is no run, one of its files holds something else, or the report cannot be written.
    """
    target, text = folder / "report.html", render(folder)
    try:
        write_text(target, text)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror})") from error
    return target


def render(folder: Path) -> Markup:
    """The page.

    Raises:
        ConfigError: there is no run. FileError: one of its files holds something else, or is a link.
    """
    run, steps = read(folder), read_metrics(folder)
    trained = [step for step in steps if "reward/mean" in step]
    figures = _figures(steps, trained, run.verifier)
    settings = table([], [[key, value] for key, value in run.settings.items()])
    return page(
        run.name,
        element("h1", run.name),
        *_facts(run),
        element("h2", "Training"),
        element("div", *(figures if any(figures) else [element("p", "No step has ended.")]), class_="charts"),
        element("h2", "Samples"),
        *_samples(folder),
        element("details", element("summary", "Settings"), settings),
    )


def page(title: str, *body: object) -> Markup:
    """A page that needs nothing else."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("title", title),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("style", Markup(STYLE)),
    )
    return together(Markup("<!doctype html>"), element("html", head, element("body", *body), lang="en"), "\n")


def table(head: Sequence[object], rows: Sequence[Sequence[object]], numbers: Sequence[object] = ()) -> Markup:
    """A table with a row of names, if there are any; columns called as in `numbers` stand on the right."""
    looks = ["n" if name in numbers else None for name in head] or [None] * max(map(len, rows), default=0)

    def row(kind: str, cells: Sequence[object]) -> Markup:
        return element("tr", *(element(kind, cell, class_=look) for cell, look in zip(cells, looks, strict=True)))

    body = element("tbody", *(row("td", cells) for cells in rows))
    return element("table", element("thead", row("th", head)) if head else None, body)


def _facts(run: Run) -> list[Markup]:
    facts = {"algo": run.algo, "step": run.step, "who": run.who, "when": run.when, "tags": run.tags}
    status = element("span", run.status, class_="failed" if run.status == "failed" else None)
    shown = {"status": status, **{key: value for key, value in facts.items() if value != ""}}
    spans = [element("span", element("b", key), " ", value) for key, value in shown.items()]
    error = (run.error or "").strip().partition("\n")[0]
    return [element("p", *spans, class_="facts"), *([element("p", error, class_="failed")] if error else [])]


def _figures(steps: Sequence[Record], trained: Sequence[Record], verifier: str | None) -> list[Markup]:
    """Every chart that the records have something for."""

    def of(*keys: str, among: Sequence[Record] = trained) -> dict[str, list[tuple[float, float]]]:
        points = {key: [(step["step"], step.get(key)) for step in among] for key in keys}
        return {key: [(x, y) for x, y in own if x is not None and y is not None] for key, own in points.items()}

    measured = [
        key
        for key in dict.fromkeys(key for step in steps for key in step)
        if key.startswith("eval/") and key.endswith(("/greedy", "/mean"))
    ]
    rewards = dict.fromkeys(key for step in steps for key in step if key.startswith("eval/") and key.endswith("/reward"))
    phases = {
        phase: [(step["step"] or 0, step.get(f"time/{phase}_s") or 0.0) for step in trained]
        for phase in PHASES
        if any(f"time/{phase}_s" in step for step in trained)
    }
    return [
        lines("reward", of("reward/mean")),
        lines(_measure(verifier), of(*measured, among=steps)),
        *([lines("held-out reward", of(*rewards, among=steps))] if rewards else []),
        lines("KL", of("policy/kl", "kl/sampled", "policy/approx_kl"), "nats per token"),
        lines("entropy", of("policy/entropy"), "nats per token"),
        lines("response length", of("response/length_mean", "response/length_max"), "tokens", zero=True),
        lines("explained variance of the critic", of("critic/explained_variance")),
        lines(
            "clipped, truncated, without signal",
            of("policy/clip_frac", "response/truncated_frac", "group/zero_std_frac"),
            "share",
        ),
        lines("sampler against trainer", of("rollout/logprob_gap"), "nats per token"),
        lines("gradient norm", of("policy/grad_norm", "critic/grad_norm")),
        areas("time per phase", phases, "s"),
        lines("throughput", of("tokens/response_per_s"), "response tokens per s", zero=True),
        bars("memory per role at the end", _memory(trained), "GiB"),
    ]


def _memory(trained: Sequence[Record]) -> dict[str, dict[str, float]]:
    """By role weights, gradients and optimizer, and what its process has had besides at its peak."""
    rows: dict[str, dict[str, float]] = {}
    for key, value in (trained[-1] if trained else {}).items():
        if value and (found := memory_key(key)):
            rows.setdefault(found[0], {})[found[1]] = value / GIB
    for row in rows.values():
        if "peak" in row:
            row["other at peak"] = max(0.0, row.pop("peak") - sum(row.values()))
    return rows


def _samples(folder: Path) -> list[Markup]:
    """A table of the newest samples."""
    rows = read_samples(folder)
    if not rows:
        return [element("p", "None were kept (tracking.samples_every).")]
    body = []
    for step, row in rows[:SAMPLES]:
        parts = ", ".join(f"{name} {_number(value)}" for name, value in row.parts.items())
        texts = [element("pre", text) for text in (row.prompt, row.response)]
        numbers = [_number(row.advantage), _number(row.logprob_gap), row.response_tokens]
        body.append([step, *texts, row.answer, _number(row.reward), parts, *numbers, row.problem or row.stop])
    head = ("step", "prompt", "response", "answer", "reward", "parts", "advantage", "log-prob gap", "tokens", "stop")
    note = [element("p", f"The newest {SAMPLES} of {len(rows)}.")] if len(rows) > SAMPLES else []
    columns = ("step", "reward", "advantage", "log-prob gap", "tokens")
    return [*note, element("div", table(head, body, columns), class_="wide")]


def _measure(verifier: str | None) -> str:
    """What stands over the curves of held-out sets."""
    if verifier is None:
        return "held-out reward (no verifier)"
    return f"held-out accuracy ({verifier})" if verifier else "held-out accuracy"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
