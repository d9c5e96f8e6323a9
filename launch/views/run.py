"""Reads the records of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.launch.compose.settings_file import read_settings
from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.metrics import held_out, memory_key
from tandem.platform.records.recorder import Record, read_metrics, read_summary
from tandem.platform.system.readers import read_object


@dataclass(frozen=True)
class About:
    """The fields read from a `run.json`."""

    algo: str = ""
    verifier: str | None = ""  # of held-out accuracy; None: there was no verifier, and evaluation measured the reward
    user: str = ""
    started_at: str = ""
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """The facts and results of one run."""

    name: str
    algo: str
    status: str
    error: str | None
    step: int
    reward: float | None
    verifier: str | None
    accuracy: float | None
    memory: float | None  # bytes: the peak of all roles together
    who: str
    when: str
    tags: str
    numbers: Mapping[str, float | None]  # the last metrics
    settings: Mapping[str, Any]  # by dotted key


def read(folder: Path) -> Run:
    """Reads the records of one run. A run without a summary is still running, or its process was killed.

    Raises:
        ConfigError: there is no run. FileError: one of its files has invalid content, or is a link.
    """
    try:
        settings = read_settings(folder)
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no run there") from None
    about, summary, lines = _about(folder), read_summary(folder), read_metrics(folder)
    trained = [line for line in lines if "reward/mean" in line]
    last: Record = trained[-1] if trained else {}
    evaluated = next((line for line in reversed(lines) if held_out(line)), {})
    measured = held_out(evaluated)
    peaks = [value for key, value in last.items() if value is not None and (memory_key(key) or ("", ""))[1] == "peak"]
    return Run(
        name=folder.name,
        algo=about.algo,
        status=summary.status,
        error=summary.error,
        step=int(last.get("step") or 0),
        reward=last.get("reward/mean"),
        verifier=about.verifier,
        accuracy=next((evaluated[key] for key, metric in measured.items() if metric.measure == "greedy"), None)
        if about.verifier is not None
        else None,
        # Roles in one process all report the peak of that process.
        memory=(max if settings.get("cluster.name") == "inline" else sum)(peaks) if peaks else None,
        who=about.user,
        when=about.started_at,
        tags=",".join(about.tags),
        numbers={**last, **{key: evaluated[key] for key in measured}},
        settings=settings,
    )


def _about(folder: Path) -> About:
    try:
        return read_object(folder / "run.json", About, below=folder)
    except FileNotFoundError:
        return About()


def changed(run: Run) -> dict[str, Any]:
    """The settings of a run that differ from the defaults of its algorithm and kind of model; all if those are unknown."""
    from tandem.launch.compose.compose import config_groups

    groups = config_groups()
    chosen = {group: str(run.settings.get(f"{group}.name", "")) for group in groups}
    known = tuple(f"{group}={name}" for group, name in chosen.items() if name in groups[group])
    path = run.settings.get("model.path")
    defaults = _defaults((*known, f"model.path={path}") if path else known)
    return {key: value for key, value in run.settings.items() if key not in defaults or defaults[key] != value}


@lru_cache(maxsize=32)
def _defaults(overrides: tuple[str, ...]) -> Mapping[str, Any]:
    """The settings of a command line by dotted key; empty if the command line is invalid."""
    from tandem.launch.compose.compose import compose, flat

    try:
        values = flat(compose(overrides)[0])
    except ConfigError:
        return {}
    parts = {
        f"{key}.{name}": part for key, value in values.items() if isinstance(value, dict) for name, part in value.items()
    }
    return {**values, **parts}  # a settings file is read down to its leaves
