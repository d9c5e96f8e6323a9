"""Runs the benchmark: one run after the other on the same devices, alternating arms; saves each run when it ends."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.benchmarks.ab.arms import Arm, differing
from tandem.benchmarks.ab.measure import columns
from tandem.benchmarks.ab.shapes import others_now
from tandem.launch.main import main as _main
from tandem.launch.storage.claim import claimed
from tandem.platform.config.schema import ConfigError
from tandem.platform.records.recorder import Record, read_metrics, read_summary
from tandem.platform.system.files import open_regular, own_folder, read_lines, write_json
from tandem.platform.system.readers import read_object
from tandem.platform.system.terminal import say

LAUNCH = Path(str(sys.modules[_main.__module__].__file__)).resolve()
FINISHED, FAILED = "finished", "failed"
REFUSED = 2  # exit code of a run that did not start
STOPPED = (130, 143, -2, -15)  # exit codes of a run that was ended from outside, which must be repeated


@dataclass(frozen=True)
class Run:
    """The results of one run: `records` are the lines of its metrics.jsonl."""

    arm: str
    seed: int
    status: str
    error: str | None
    settings: dict[str, Any]
    identity: dict[str, str]  # digests of first weights and data
    startup_s: float | None
    devices: float | None  # GPUs held, or else CPUs
    machine: dict[str, Any]
    records: list[Record] = field(repr=False)
    others: float | None = None  # share of the cores that other processes used before or after it


class Interrupted(Exception):
    """A run was ended from outside; finished runs are kept."""


def order(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, int]]:
    """Every arm with every seed. Each seed starts with a different arm, so a machine that slows down favours no arm."""
    for place, seed in enumerate(seeds):
        turn = place % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            yield arm, seed


def run_all(arms: Sequence[Arm], seeds: Sequence[int], out: Path, where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Makes every run that is not in `out` yet; returns all runs as raw results.

    Raises:
        ConfigError: `out` holds a run with other settings or of another machine, another benchmark writes there, or a run
            was refused. Interrupted: a run was ended from outside.
    """
    wanted = list(order(arms, seeds))
    with claimed(out) as lock:
        for arm, seed in wanted:
            if kept := _kept(arm, seed, out):
                _check_same(arm, kept, where, out)
        results = []
        for number, (arm, seed) in enumerate(wanted, start=1):
            run = _kept(arm, seed, out)
            if run is None:
                say(f"{number}/{len(wanted)}  {arm.name} seed {seed} ", end="")
                start = time.monotonic()
                run = make_run(arm, seed, out, where, lock)
                say(f"{run.status} in {time.monotonic() - start:.0f} s {run.error or ''}".rstrip())
            results.append(raw(run))
    return results


def make_run(arm: Arm, seed: int, out: Path, where: Mapping[str, Any], lock: int) -> Run:
    """Makes one run with the training command; its status is part of the result.

    Args:
        lock: descriptor of the folder's lock. The run inherits it, so no other benchmark starts beside a run that outlives
            this process.

    Raises:
        Interrupted: the run was ended from outside. ConfigError: the run was refused at its start.
    """
    name = _name(arm, seed)
    folder, log = out / "runs" / name, out / "runs" / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    own_folder(folder.parent, below=out)
    identity = [f"run.seed={seed}", f"run.name={name}", f"run.dir='{folder.parent.absolute()}'", "checkpoint.resume=never"]
    others = [others_now()]
    with os.fdopen(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, below=out), "w") as text:
        command = [sys.executable, str(LAUNCH), *arm.overrides, *identity]
        process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT, pass_fds=[lock])
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code in STOPPED:
        raise Interrupted(f"{name} was ended from outside")
    if code == REFUSED:
        raise ConfigError(f"{name} was refused: {_last_line(log)}")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    others.append(others_now())
    run = replace(_read(arm, seed, folder, log, code, where), others=max(others))
    write_json(out / "runs" / f"{name}.json", asdict(run))
    return run


def raw(run: Run) -> dict[str, Any]:
    """A run in the form of the raw results: needed columns, evaluations, memory."""
    steps, evals, memory = columns(run.records)
    names = ("arm", "seed", "status", "error", "identity", "startup_s", "devices", "others")
    rounded = {key: [None if value is None else float(f"{value:.6g}") for value in column] for key, column in steps.items()}
    return {**{key: getattr(run, key) for key in names}, "steps": rounded, "evals": evals, "memory": memory}


def machine() -> dict[str, Any]:
    """The machine of the runs."""
    import torch

    from tandem.launch.assembly.versions import versions

    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"host": platform.node(), "cores": len(os.sched_getaffinity(0)), "gpus": devices, "versions": versions()}


def weights_digest(path: str) -> str:
    """Digest of the weights in a folder; a hub name is returned unchanged."""
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    if not files:
        return path
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]


def _read(arm: Arm, seed: int, folder: Path, log: Path, code: int, where: Mapping[str, Any]) -> Run:
    summary = read_summary(folder)
    finished = code == 0 and summary.status == FINISHED
    error = summary.error or _last_line(log) or f"exit code {code}"
    return Run(
        arm=arm.name,
        seed=seed,
        status=FINISHED if finished else FAILED,
        error=None if finished else str(error).splitlines()[0],
        settings=arm.settings,
        identity=summary.identity,
        startup_s=summary.startup_s,
        devices=summary.devices,
        machine=dict(where),
        records=read_metrics(folder),
    )


def _kept(arm: Arm, seed: int, out: Path) -> Run | None:
    try:
        return read_object(out / "runs" / f"{_name(arm, seed)}.json", Run, below=out)
    except FileNotFoundError:
        return None


def _check_same(arm: Arm, kept: Run, where: Mapping[str, Any], out: Path) -> None:
    for before, now in ((kept.settings, arm.settings), (kept.machine, where)):
        current = json.loads(json.dumps(now, default=str))
        if different := differing(before, current):
            key, (old, new) = next(iter(different.items()))
            raise ConfigError(
                f"{out} holds {arm.name}-seed{kept.seed} with {key}={old}, but it is {new} here. Set another out=FOLDER"
            )


def _name(arm: Arm, seed: int) -> str:
    return f"{arm.name}-seed{seed}"


def _last_line(log: Path) -> str:
    last = b""
    for _, line in read_lines(log):
        last = line
    return last.decode(errors="replace").strip()
