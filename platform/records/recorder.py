"""The records of a run: `metrics.jsonl`, `summary.json` and `samples/`. Completed steps are never lost."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.platform.experience.metrics import held_out, memory_key
from tandem.platform.system.files import FileError, open_regular, own_folder, refuse_links, write_json, write_text
from tandem.platform.system.readers import LARGEST_BITS, MAX_DEPTH, kind_of, read_object, read_objects
from tandem.platform.system.redact import redacted, redacted_values

if TYPE_CHECKING:  # records can be closed without torch
    from tandem.platform.experience.batch import Rollout, Score
    from tandem.platform.experience.metrics import Metrics

Record = dict[str, float | None]
"""A line of `metrics.jsonl`."""
SAMPLE_FILE = re.compile(r"step-(\d{1,18})\.jsonl", re.ASCII)


@dataclass(frozen=True)
class Summary:
    """The fields of a `summary.json` that are read."""

    status: str = "running or killed"  # default while there is no file
    error: str | None = None
    identity: dict[str, str] = field(default_factory=dict)
    startup_s: float | None = field(default=None, metadata={"key": "time/startup_s"})
    devices: float | None = None
    steps: int = 0
    total_s: float | None = field(default=None, metadata={"key": "time/total_s"})


@dataclass(frozen=True)
class SampleRow:
    """The fields of a line of `samples/` that are read; `sample_rows` writes them."""

    prompt: str = ""
    response: str = ""
    answer: Any = None
    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    problem: str | None = None
    advantage: float | None = None
    logprob_gap: float | None = None
    stop: str = ""
    response_tokens: int | None = None


def read_metrics(folder: Path) -> list[Record]:
    """The records of a run's folder; empty without a `metrics.jsonl`. A truncated last line is ignored.

    Raises:
        FileError: a line is not a record.
    """
    records = []
    try:
        for where, record in read_objects(folder / "metrics.jsonl", Record, below=folder):
            if not isinstance(record.get("step"), int):
                raise FileError(f"{where}: field 'step' is {kind_of(record.get('step'))}, expected a whole number")
            records.append(record)
    except FileNotFoundError:
        return []
    return records


def read_summary(folder: Path) -> Summary:
    """The summary of a run's folder; defaults without a `summary.json`.

    Raises:
        FileError: the file is not a summary.
    """
    try:
        return read_object(folder / "summary.json", Summary, below=folder)
    except FileNotFoundError:
        return Summary()


def read_samples(folder: Path) -> list[tuple[int, SampleRow]]:
    """(step, row) of all samples in a run's folder, newest step first.

    Raises:
        FileError: a line is not a sample.
    """
    place = folder / "samples"
    refuse_links(place, folder)
    if place.exists() and not place.is_dir():
        raise FileError(f"{place} is not a folder")
    named = {path: SAMPLE_FILE.fullmatch(path.name) for path in (place.iterdir() if place.exists() else ())}
    steps = {path: int(match[1]) for path, match in named.items() if match}
    newest = sorted(steps, key=lambda path: steps[path], reverse=True)
    return [(steps[path], row) for path in newest for _, row in read_objects(path, SampleRow, below=folder)]


def plain(metrics: Mapping[str, float]) -> Record:
    """Metrics as JSON values: whole numbers as integers, non-finite numbers as null."""
    result: Record = {}
    for name, value in metrics.items():
        if not math.isfinite(value):
            result[name] = None
        else:
            result[name] = int(value) if float(value).is_integer() else value
    return result


def readable(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Any value as JSON, for human readers: non-finite numbers become null, types unknown to JSON become text.

    A value that contains itself or is nested too deeply becomes the name of its type. `above`: ids of the containers of
    the value.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= LARGEST_BITS else _as_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if len(above) == MAX_DEPTH or id(value) in above:
        return f"<{type(value).__name__}>"
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        return {_as_text(key): readable(item, inside) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [readable(item, inside) for item in value]
    return _as_text(value)


def _as_text(value: Any) -> str:
    """The text of a value, or the name of its type if `str` fails."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _once(note: Callable[[str], None]) -> Callable[[str], None]:
    """Wraps `note` to pass on only the first text."""
    noted: list[str] = []

    def pass_on(text: str) -> None:
        if not noted:
            noted.append(text)
            note(text)

    return pass_on


class Recorder:
    """Writes the records of one run into its folder.

    Args:
        started_at: start of the command, in seconds since the epoch.
        resumed_after: step after which the run resumes. Records of later steps are dropped; these steps run again.
        on_record: called with every record after it is written.
        note: shows a warning.

    Raises:
        FileError: the existing records are invalid, or a record file is a link.
    """

    def __init__(
        self,
        folder: Path,
        started_at: float,
        resumed_after: int | None = None,
        on_record: Callable[[Record], None] = lambda record: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder, self.started_at, self._resumed_after = folder, started_at, resumed_after
        self._on_record, self._note_once = on_record, _once(note)
        self.steps = resumed_after or 0  # number of recorded steps
        self._last: Metrics = {}
        self._evals: list[Metrics] = []
        self._startup_s: float | None = None
        self.identity: dict[str, str] = {}  # digests of initial weights and data
        self.devices: float | None = None  # number of GPUs that the run holds, or of CPUs
        self._peak: dict[str, int] = {}
        before = folder / "metrics.jsonl"
        if resumed_after is not None and (before.exists() or before.is_symlink()):
            kept = [record for record in read_metrics(folder) if (record["step"] or 0) <= resumed_after]
            for record in kept:
                known = {name: math.nan if value is None else value for name, value in record.items()}
                self._note(known)
                self._last = known if "reward/mean" in record else self._last
            write_text(before, "".join(json.dumps(record) + "\n" for record in kept))
        descriptor = open_regular(before, os.O_WRONLY | os.O_APPEND | os.O_CREAT, below=folder)
        self._metrics = os.fdopen(descriptor, "a", buffering=1)

    @classmethod
    def of_ended(cls, folder: Path, started_at: float) -> Recorder:
        """Reopens the records of a run whose process ended before it closed them."""
        steps = [int(record["step"] or 0) for record in read_metrics(folder)]
        recorder = cls(folder, started_at, max(steps, default=0))
        recorder._resumed_after = None
        return recorder

    def step(self, step: int, metrics: Metrics, finished_at: float) -> None:
        """Writes one training step immediately. `finished_at`: seconds since the epoch, before any evaluation."""
        if self._startup_s is None:
            self._startup_s = finished_at - self.started_at
        self.steps, self._last = step, metrics
        self._note(metrics)
        self._write(metrics)

    def first_evaluation(self, metrics: Metrics) -> None:
        """Writes the evaluation before training starts or resumes. Its step is the last completed step, 0 at the start."""
        if len(metrics) > 1:
            self._note(metrics)
            self._write(metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a few rollouts of a step to `samples/step-<step>.jsonl`.

        The samples are for inspection only: if they cannot be written, the run continues after one warning. Values that
        JSON does not support are written as text.
        """
        try:
            place = own_folder(self.folder / "samples", below=self.folder)
            text = "".join(json.dumps(redacted_values(readable(row)), ensure_ascii=False) + "\n" for row in rows)
            write_text(place / f"step-{step:06d}.jsonl", text)
        except Exception as error:
            self._note_once(
                f"warning: cannot write the samples of step {step} ({type(error).__name__}: {error}); the run continues"
            )

    def close(self, status: str, error: str | None = None) -> None:
        """Writes `summary.json`; `status` is finished, interrupted or failed.

        Raises:
            OSError: the metrics were deleted or are incomplete, or the summary cannot be written. Raised after all steps
                of closing have been tried.
        """
        problem: OSError | None = None
        try:
            if os.fstat(self._metrics.fileno()).st_nlink == 0:
                problem = FileNotFoundError(f"{self.folder / 'metrics.jsonl'} was deleted while the run wrote to it")
            self._metrics.close()
        except OSError as error_of_close:
            problem = error_of_close
        self._summarise(status, error)
        if problem is not None:
            raise problem

    def _summarise(self, status: str, error: str | None) -> None:
        summary = {
            "status": status,
            "error": None if error is None else redacted(error),
            "steps": self.steps,
            "identity": self.identity,
            "devices": self.devices,
            "resumed_after": self._resumed_after,
            "time/startup_s": self._startup_s,
            "time/total_s": time.time() - self.started_at,
            "eval_first": plain(self._evals[0]) if self._evals else None,
            "eval_last": plain(self._evals[-1]) if self._evals else None,
            "peak_memory_bytes": self._peak,
            "metrics": plain(self._last),
        }
        write_json(self.folder / "summary.json", summary)

    def _note(self, metrics: Mapping[str, Any]) -> None:
        """Collects from a record what the summary needs: peak memory and evaluations."""
        for name, value in metrics.items():
            role, kind = memory_key(name) or ("", "")
            if kind == "peak" and math.isfinite(value):
                self._peak[role] = max(self._peak.get(role, 0), int(value))
        measured = {name: metrics[name] for name in held_out(metrics)}
        if measured:
            self._evals.append({"step": metrics["step"], **measured})

    def _write(self, metrics: Metrics) -> None:
        record = plain(metrics)
        self._metrics.write(json.dumps(record) + "\n")
        self._on_record(record)


def sample_rows(
    rollouts: Sequence[Rollout], scores: Sequence[Score], advantages: Sequence[float], gaps: Sequence[float]
) -> list[dict[str, Any]]:
    """Rollouts in readable form: prompt, response, reward with its parts.

    Args:
        advantages: mean over each response. gaps: mean distance over each response between the log-probs of sampler and
            trainer.
    """
    return [
        {
            "group_id": rollout.prompt.group_id,
            "prompt": rollout.prompt.text,
            "response": rollout.response_text,
            "answer": rollout.prompt.answer,
            "reward": score.reward,
            "parts": dict(score.parts),
            "problem": score.problem,
            "advantage": advantage,
            "logprob_gap": gap,
            "stop": str(rollout.stop),
            "response_tokens": len(rollout.response_ids),
            "policy_version": rollout.policy_version,
        }
        for rollout, score, advantage, gap in zip(rollouts, scores, advantages, gaps, strict=True)
    ]
