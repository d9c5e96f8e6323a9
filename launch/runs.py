"""Lists, shows and compares the runs of a folder: `python launch/runs.py`, `... show NAME`, `... compare A B`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.launch.compose.command import command
from tandem.launch.views.run import Run, changed, read
from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.metrics import held_out, memory_key
from tandem.platform.system.files import confined
from tandem.platform.system.terminal import one_line, say
from tandem.platform.system.text import human_bytes, table

USAGE = """usage: python launch/runs.py [COMMAND] [folder=outputs] [FIELD=TEXT ...]

  list                        name, algorithm, status, step, reward, accuracy, peak memory, who, when (the default)
  show NAME [--all]           one run: its last numbers, and the settings that differ from the defaults, or all
  compare A B                 settings in which two runs differ, and their last numbers side by side

  folder=FOLDER               the folder of the runs
  algo=ppo status=failed ...  only runs with this text in that field: name, algo, status, who, when, tags"""

COLUMNS = ("name", "algo", "status", "step", "reward", "accuracy", "memory", "who", "when")
FILTERS = ("name", "algo", "status", "who", "when", "tags")
NUMBERS = ("reward/mean", "response/length_mean", "policy/kl", "policy/entropy", "critic/explained_variance", "time/step_s")


@command("runs", USAGE)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 shown, 2 not)."""
    whole = "--all" in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    folder = Path(options.pop("folder", "outputs"))
    asked, *names = [argument for argument in arguments if "=" not in argument] or ["list"]
    if unknown := sorted(options.keys() - set(FILTERS)):
        raise ConfigError(f"{unknown[0]}: no such field; expected {', '.join(FILTERS)}")
    if (asked, len(names)) not in (("list", 0), ("show", 1), ("compare", 2)):
        raise ConfigError(f"{' '.join([asked, *names])}: expected list, show NAME, or compare A B")
    for name in names:
        if "/" in confined(name, asked):
            raise ConfigError(
                f"{asked} {name}: expected the name of a run in {folder}; folder=FOLDER sets the folder of runs"
            )
    runs = [read(folder / name) for name in names]
    say(listing(folder, options) if not runs else show(runs[0], whole) if len(runs) == 1 else compare(*runs))
    return 0


def listing(folder: Path, wanted: Mapping[str, str]) -> str:
    """A table of the runs of a folder, newest last; only those with the wanted texts in their fields.

    Raises:
        ConfigError: `folder` is not a folder.
    """
    runs, left_out = [], []
    for path in _folders(folder):
        try:
            runs.append(read(path))
        except ConfigError as error:
            left_out.append(one_line(f"{path.name} is left out: {error}"))
    chosen = [run for run in runs if all(text in str(getattr(run, name)) for name, text in wanted.items())]
    if not chosen:
        having = " with " + ", ".join(f"{key}={text}" for key, text in wanted.items()) if wanted else ""
        return "\n".join([f"no runs in {folder}{having}", *left_out])
    rows = [[_cell(column, getattr(run, column)) for column in COLUMNS] for run in sorted(chosen, key=lambda run: run.when)]
    return "\n".join([_table([list(COLUMNS), *rows]), *left_out])


def _folders(folder: Path) -> list[Path]:
    """The subfolders that hold settings, and so are runs."""
    try:
        return sorted(path for path in folder.iterdir() if os.path.lexists(path / "config.yaml"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"folder={folder}: cannot be read ({error})") from error


def show(run: Run, whole: bool = False) -> str:
    """One run: its facts, its last metrics, and the settings that differ from the defaults, or all settings."""
    head = [[column, _cell(column, getattr(run, column))] for column in (*COLUMNS, "tags")]
    if run.error:
        head.append(["error", run.error])
    numbers = [[key, _amount(key, value)] for key, value in _chosen(run).items()]
    settings = [[key, str(value)] for key, value in (run.settings if whole else changed(run)).items()]
    return "\n\n".join(_table(part) for part in (head, numbers, settings) if part)


def compare(one: Run, other: Run) -> str:
    """The settings in which two runs differ, then their last metrics side by side."""
    names = [one.name, other.name]
    different = [
        [key, *(str(run.settings.get(key, "-")) for run in (one, other))]
        for key in dict.fromkeys([*one.settings, *other.settings])
        if key not in ("run.name", "run.dir") and one.settings.get(key) != other.settings.get(key)
    ]
    first, second = _chosen(one), _chosen(other)
    numbers = [
        [key, _amount(key, first.get(key)), _amount(key, second.get(key)), _difference(first.get(key), second.get(key))]
        for key in dict.fromkeys([*first, *second])
    ]
    settings_part = _table([["setting", *names], *different]) if different else "the settings are the same"
    return settings_part + "\n\n" + _table([["last", *names, "difference"], *numbers])


def _chosen(run: Run) -> dict[str, float | None]:
    """The main metrics of a run."""
    numbers = run.numbers
    hidden = ("_low", "_high", "_unscorable")
    evals = [key for key, metric in held_out(numbers).items() if not metric.measure.endswith(hidden)]
    memory = [key for key in numbers if (memory_key(key) or ("", ""))[1] == "peak"]
    return {key: numbers[key] for key in ("step", *NUMBERS, *evals, *memory) if key in numbers}


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "memory":
        return human_bytes(value)
    return _number(value)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _amount(key: str, value: float | None) -> str:
    return human_bytes(value) if value is not None and memory_key(key) else _number(value)


def _difference(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{other - one:+.4g}"


def _table(texts: Sequence[Sequence[str]]) -> str:
    """A table with one line per cell, whatever text the files of runs contain."""
    return table([[one_line(text) for text in row] for row in texts], indent="")


if __name__ == "__main__":
    sys.exit(main())
