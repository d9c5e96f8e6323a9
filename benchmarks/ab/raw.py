"""The types of `results.json`, which a report is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.costs import ModelShape, Peak
from tandem.platform.system.files import read_text
from tandem.platform.system.readers import parse_json, parsed


@dataclass(frozen=True)
class RawPlan:
    """What was asked for."""

    seeds: list[int]
    skip_steps: int
    completions: int
    comparisons: list[list[str]]


@dataclass(frozen=True)
class RawMachine:
    """Where the runs were made."""

    cores: int
    gpus: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class RawModel:
    """What was trained."""

    path: str
    parameters: int
    digest: str


@dataclass(frozen=True)
class RawArm:
    """How an arm was set up."""

    name: str
    label: str
    algo: str
    is_plain: bool
    group: int
    prompts: int
    actor: ModelShape
    critic: ModelShape | None
    differs: dict[str, Any]


@dataclass(frozen=True)
class RawRun:
    """What a run measured; `evals` has points (step, value)."""

    arm: str
    seed: int
    status: str
    error: str | None
    identity: dict[str, str]
    startup_s: float | None
    devices: float | None
    steps: dict[str, list[float | None]]
    evals: dict[str, list[list[float]]]
    memory: dict[str, dict[str, float | None]]
    others: float | None = None  # share of the cores that other processes used before or after it


@dataclass(frozen=True)
class RawResults:
    """All of it but for what is derived."""

    plan: RawPlan
    machine: RawMachine
    peak_flops: float | None
    model: RawModel
    data: str
    settings: dict[str, Any]
    arms: list[RawArm]
    runs: list[RawRun]
    peak: Peak | None = None  # how peak_flops was measured


def read_raw(folder: Path) -> Mapping[str, Any]:
    """The raw results in a folder, every field of its type.

    Raises:
        ConfigError: there are none. FileError: names the field that is of another type.
    """
    path = folder / "results.json"
    try:
        content = parse_json(read_text(path, below=folder), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no results.json to build a report from") from None
    parsed(content, RawResults, str(path))
    return parsed(content, dict[str, Any], str(path))
