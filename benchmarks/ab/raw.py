"""The types of the raw results in `results.json`, from which the report is built."""

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
    """The settings of the benchmark."""

    seeds: list[int]
    skip_steps: int
    completions: int
    comparisons: list[list[str]]


@dataclass(frozen=True)
class RawMachine:
    """The machine of the runs."""

    cores: int
    gpus: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class RawModel:
    """The trained model."""

    path: str
    parameters: int
    digest: str


@dataclass(frozen=True)
class RawArm:
    """The definition of an arm."""

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
    """The measurements of a run; `evals` has points (step, value)."""

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
    """All raw results."""

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
    """Reads the raw results in a folder and checks the types of all fields.

    Raises:
        ConfigError: there are no results. FileError: a field has the wrong type; names the field.
    """
    path = folder / "results.json"
    try:
        content = parse_json(read_text(path, below=folder), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no results.json to build a report from") from None
    parsed(content, RawResults, str(path))
    return parsed(content, dict[str, Any], str(path))
