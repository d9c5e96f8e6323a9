"""A run as one page that needs nothing else: `python launch/report.py outputs/NAME` writes `report.html` there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from tandem.launch.charts import areas, bars, lines
from tandem.launch.runs import read, records
from tandem.platform.config import ConfigError
from tandem.platform.records import write_text
from tandem.platform.redact import redacted
from tandem.platform.spans import PHASES

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
.status-failed { color: #b00020; } details { margin-top: 10px; } summary { cursor: pointer; }
@media print { .charts { grid-template-columns: 1fr 1fr; } svg, tr { break-inside: avoid; } }
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print("usage: python launch/report.py outputs/NAME\n\nWrites report.html into the folder of the run.")
        return 0 if arguments else 2
    try:
        print(write(Path(arguments[0])))
    except ConfigError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def write(folder: Path) -> Path:
    """Writes the report of the run in a folder; returns its path.

    Raises:
        ConfigError: there is no run.
    """
    target = folder / "report.html"
    write_text(target, redacted(render(folder)))
    return target


def render(folder: Path) -> str:
    """The page."""
    run = read(folder)
    steps = records(folder)
    trained = [step for step in steps if "reward/mean" in step]
    name = escape(str(run["name"]))
    figures = "".join(_figures(steps, trained))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{name}</h1>{_facts(run)}"
        f'<h2>Training</h2><div class="charts">{figures or "<p>No step has ended.</p>"}</div>'
        f"<h2>Samples</h2>{_samples(folder)}{_settings(run)}</body></html>\n"
    )


def _facts(run: Mapping[str, Any]) -> str:
    status = f'<span class="status-{run["status"]}">{escape(str(run["status"]))}</span>'
    facts = {key: escape(str(run[key])) for key in ("algo", "step", "who", "when", "tags") if run[key] not in ("", None)}
    shown = [
        f"<span><b>status</b> {status}</span>",
        *(f"<span><b>{key}</b> {value}</span>" for key, value in facts.items()),
    ]
    error = f'<p class="status-failed">{escape(str(run["error"]).splitlines()[0])}</p>' if run["error"] else ""
    return f'<p class="facts">{"".join(shown)}</p>{error}'


def _figures(steps: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every chart that the records have something for."""

    def of(*keys: str, among: Sequence[Mapping[str, Any]] = trained) -> dict[str, list[tuple[float, float]]]:
        return {key: [(step["step"], step[key]) for step in among if step.get(key) is not None] for key in keys}

    measured = [
        key
        for key in dict.fromkeys(key for step in steps for key in step)
        if key.startswith("eval/") and key.endswith(("/greedy", "/mean"))
    ]
    phases = {
        phase: [(step["step"], step.get(f"time/{phase}_s") or 0.0) for step in trained]
        for phase in PHASES
        if any(f"time/{phase}_s" in step for step in trained)
    }
    return [
        lines("reward", of("reward/mean")),
        lines("held-out accuracy", of(*measured, among=steps)),
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


def _memory(trained: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By role weights, gradients and optimizer, and what its process has had besides at its peak."""
    if not trained:
        return {}
    rows: dict[str, dict[str, float]] = {}
    for key, value in trained[-1].items():
        if key.startswith("memory/") and value:
            _, role, kind = key.split("/")
            rows.setdefault(role, {})[kind.removesuffix("_bytes")] = value / GIB
    for row in rows.values():
        if "peak" in row:
            row["other at peak"] = max(0.0, row.pop("peak") - sum(row.values()))
    return rows


def _samples(folder: Path) -> str:
    """A table of the newest samples."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for path in sorted((folder / "samples").glob("step-*.jsonl"), reverse=True):
        for line in path.read_text("utf-8", errors="replace").split("\n"):
            with suppress(ValueError):  # the run may just be writing it
                rows.append((int(path.stem.rpartition("-")[2]), json.loads(line)))
    if not rows:
        return "<p>None were kept (tracking.samples_every).</p>"
    head = ("step", "prompt", "response", "answer", "reward", "parts", "advantage", "log-prob gap", "tokens", "stop")
    body = []
    for step, row in rows[:SAMPLES]:
        parts = ", ".join(f"{name} {_number(value)}" for name, value in row["parts"].items())
        cells = [
            f'<td class="n">{step}</td>',
            f"<td><pre>{escape(str(row['prompt']))}</pre></td>",
            f"<td><pre>{escape(str(row['response']))}</pre></td>",
            f"<td>{escape(str(row['answer']))}</td>",
            f'<td class="n">{_number(row["reward"])}</td>',
            f"<td>{escape(parts)}</td>",
            f'<td class="n">{_number(row["advantage"])}</td>',
            f'<td class="n">{_number(row.get("logprob_gap"))}</td>',
            f'<td class="n">{row["response_tokens"]}</td>',
            f"<td>{escape(str(row['problem'] or row['stop']))}</td>",
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    numbers = ("step", "reward", "advantage", "log-prob gap", "tokens")
    heads = "".join(f"<th{' class=n' if name in numbers else ''}>{name}</th>" for name in head)
    note = f"<p>The newest {SAMPLES} of {len(rows)}.</p>" if len(rows) > SAMPLES else ""
    return f'{note}<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _settings(run: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in run["settings"].items()
    )
    return f"<details><summary>Settings</summary><table><tbody>{rows}</tbody></table></details>"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
