"""Look at the runs of a folder: `python launch/runs.py`, `... show NAME`, `... compare A B`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.launch.command import command
from tandem.platform.config import ConfigError
from tandem.platform.plan import human_bytes
from tandem.platform.terminal import one_line, say

USAGE = """usage: python launch/runs.py [COMMAND] [folder=outputs] [FIELD=TEXT ...]

  list                        name, algorithm, status, step, reward, accuracy, peak memory, who, when (the default)
  show NAME                   one run: settings that differ from the defaults, its last numbers
  compare A B                 settings in which two runs differ, and their last numbers side by side

  folder=FOLDER               where the runs are
  algo=ppo status=failed ...  only runs with this text in that field: name, algo, status, who, when, tags"""

COLUMNS = ("name", "algo", "status", "step", "reward", "accuracy", "memory", "who", "when")
FILTERS = ("name", "algo", "status", "who", "when", "tags")
NUMBERS = ("reward/mean", "response/length_mean", "policy/kl", "policy/entropy", "critic/explained_variance", "time/step_s")


@command("runs")
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 shown, 2 not)."""
    if {"-h", "--help"} & set(arguments):
        say(USAGE)
        return 0
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    folder = Path(given.pop("folder", "outputs"))
    asked, *names = [argument for argument in arguments if "=" not in argument] or ["list"]
    if unknown := sorted(given.keys() - set(FILTERS)):
        raise ConfigError(f"{unknown[0]}: no such field; there are {', '.join(FILTERS)}")
    if (asked, len(names)) not in (("list", 0), ("show", 1), ("compare", 2)):
        raise ConfigError(f"{' '.join([asked, *names])}: expected list, show NAME, or compare A B")
    runs = [read(folder / name) for name in names]
    say(listing(folder, given) if not runs else show(*runs) if len(runs) == 1 else compare(*runs))
    return 0


def read(folder: Path) -> dict[str, Any]:
    """What the records of one run say; a run that has no summary yet goes on, or its process was killed.

    Raises:
        ConfigError: there is no run.
    """
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder}: no run there")
    settings = _settings(folder / "config.yaml")
    about, summary = _json(folder / "run.json"), _json(folder / "summary.json")
    lines = records(folder)
    trained = [line for line in lines if "reward/mean" in line]
    last: dict[str, Any] = trained[-1] if trained else {}
    evals = [line for line in lines if any(key.startswith("eval/") for key in line)]
    measured = evals[-1] if evals else {}
    accuracy = next((value for key, value in measured.items() if key.endswith("/greedy")), None)
    peaks = [value for key, value in last.items() if key.startswith("memory/") and key.endswith("/peak_bytes")]
    return {
        "folder": folder,
        "name": folder.name,
        "algo": about.get("algo", ""),
        "status": summary.get("status", "running or killed"),
        "error": summary.get("error"),
        "step": last.get("step", 0),
        "reward": last.get("reward/mean"),
        "accuracy": accuracy,
        # Roles of one process all have its peak.
        "memory": (max if settings.get("cluster.name") == "inline" else sum)(peaks) if peaks else None,
        "who": about.get("user", ""),
        "when": about.get("started_at", ""),
        "tags": ",".join(about.get("tags", [])),
        "numbers": {**last, **{key: value for key, value in measured.items() if key.startswith("eval/")}},
        "settings": settings,
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; the run may just be writing the last one."""
    path, lines = folder / "metrics.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            lines.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            continue
    return lines


def listing(folder: Path, wanted: Mapping[str, str]) -> str:
    """A table of the runs of a folder, newest last; only those with the wanted texts in their fields."""
    runs, left_out = [], []
    for path in folder.glob("*/config.yaml"):
        try:
            runs.append(read(path.parent))
        except Exception as error:  # a folder of something else
            left_out.append(one_line(f"{path.parent.name} is left out: {type(error).__name__}: {error}"))
    chosen = [run for run in runs if all(text in str(run[field]) for field, text in wanted.items())]
    if not chosen:
        return f"no runs in {folder}" + (" with " + ", ".join(f"{k}={v}" for k, v in wanted.items()) if wanted else "")
    rows = [[_cell(column, run[column]) for column in COLUMNS] for run in sorted(chosen, key=lambda run: str(run["when"]))]
    return "\n".join([_table([list(COLUMNS), *rows]), *left_out])


def show(run: Mapping[str, Any]) -> str:
    """One run in full."""
    head = [[column, _cell(column, run[column])] for column in (*COLUMNS, "tags")]
    if run["error"]:
        head.append(["error", str(run["error"])])
    numbers = [[key, _number(value)] for key, value in _chosen(run).items()]
    settings = [[key, str(value)] for key, value in run["settings"].items()]
    return "\n\n".join(_table(part) for part in (head, numbers, settings) if part)


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Settings in which two runs differ, then their numbers side by side."""
    names = [str(one["name"]), str(other["name"])]
    keys = list(dict.fromkeys([*one["settings"], *other["settings"]]))
    own = [run["settings"] for run in (one, other)]
    different = [
        [key, *(str(settings.get(key, "-")) for settings in own)]
        for key in keys
        if key not in ("run.name", "run.dir") and own[0].get(key) != own[1].get(key)
    ]
    first, second = _chosen(one), _chosen(other)
    numbers = [
        [key, _number(first.get(key)), _number(second.get(key)), _difference(first.get(key), second.get(key))]
        for key in dict.fromkeys([*first, *second])
    ]
    settings_part = _table([["setting", *names], *different]) if different else "the settings are the same"
    return settings_part + "\n\n" + _table([["last", *names, "difference"], *numbers])


def _chosen(run: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers worth a look."""
    numbers = run["numbers"]
    evals = [key for key in numbers if key.startswith("eval/") and not key.endswith(("_low", "_high", "_unscorable"))]
    memory = [key for key in numbers if key.startswith("memory/") and key.endswith("/peak_bytes")]
    return {key: numbers[key] for key in ("step", *NUMBERS, *evals, *memory) if key in numbers}


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "memory":
        return human_bytes(value)
    return _number(value)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _difference(one: Any, other: Any) -> str:
    return "-" if one is None or other is None else f"{other - one:+.4g}"


def _table(texts: Sequence[Sequence[str]]) -> str:
    rows = [[one_line(text) for text in row] for row in texts]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, TypeError, ValueError):
        return {}


def _settings(path: Path) -> dict[str, Any]:
    """Every setting of `config.yaml` by its dotted key."""
    from omegaconf import OmegaConf

    flat: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        for key, one in value.items():
            if isinstance(one, dict) and one:
                walk(one, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = one

    walk(OmegaConf.to_container(OmegaConf.load(path)), "")
    return flat


if __name__ == "__main__":
    sys.exit(main())
