"""What a run leaves behind: `metrics.jsonl`, `summary.json` and `samples/`, written so that nothing done is lost."""

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
    """What is read of a `summary.json`."""

    status: str = "running or killed"  # there is none yet
    error: str | None = None
    identity: dict[str, str] = field(default_factory=dict)
    startup_s: float | None = field(default=None, metadata={"key": "time/startup_s"})
    devices: float | None = None
    steps: int = 0
    total_s: float | None = field(default=None, metadata={"key": "time/total_s"})


@dataclass(frozen=True)
class SampleRow:
    """What is read of a line of `samples/`; the response is told in the words of `sample_rows`."""

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
    """The records of a run's folder; none if it has no `metrics.jsonl`, and a last line that was cut off is none.

    Raises:
        FileError: a line is no record.
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
    """The summary of a run's folder, with defaults where there is none.

    Raises:
        FileError: it is no summary.
    """
    try:
        return read_object(folder / "summary.json", Summary, below=folder)
    except FileNotFoundError:
        return Summary()


def read_samples(folder: Path) -> list[tuple[int, SampleRow]]:
    """(step, row) of all samples in a run's folder, the newest first.

    Raises:
        FileError: a line is no sample.
    """
    place = folder / "samples"
    refuse_links(place, folder)
    if place.exists() and not place.is_dir():
        raise FileError(f"{place} is no folder")
    named = {path: SAMPLE_FILE.fullmatch(path.name) for path in (place.iterdir() if place.exists() else ())}
    steps = {path: int(found[1]) for path, found in named.items() if found}
    newest = sorted(steps, key=lambda path: steps[path], reverse=True)
    return [(steps[path], row) for path in newest for _, row in read_objects(path, SampleRow, below=folder)]


def plain(metrics: Mapping[str, float]) -> Record:
    """Metrics as JSON can hold them: whole numbers as integers, what is not finite as null."""
    result: Record = {}
    for name, value in metrics.items():
        if not math.isfinite(value):
            result[name] = None
        else:
            result[name] = int(value) if float(value).is_integer() else value
    return result


def readable(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Any value as JSON can hold it, for a person: numbers that are not finite are null, what JSON has not is text.

    What holds itself, or is too far down, is named by its type; `above` has the identities of what holds the value.
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
    """The text of a value, or its type where it has none."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _once(note: Callable[[str], None]) -> Callable[[str], None]:
    """Passes on the first text alone."""
    said: list[str] = []

    def pass_on(text: str) -> None:
        if not said:
            said.append(text)
            note(text)

    return pass_on


class Recorder:
    """Writes the records of one run into its folder.

    Args:
        started_at: seconds since the epoch at which the command began.
        resumed_after: step after which the run goes on; what the folder says of later ones is dropped, to be done again.
        on_record: is given every record, once it is written.
        note: shows a warning.

    Raises:
        FileError: what the folder holds are no records, or a link is in their place.
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
        self.steps = resumed_after or 0  # that are on record
        self._last: Metrics = {}
        self._evals: list[Metrics] = []
        self._startup_s: float | None = None
        self.identity: dict[str, str] = {}  # what the run began with, as digests
        self.devices: float | None = None  # GPUs that it holds, or CPUs
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
        """For a run whose process ended before it closed its records: with what they hold."""
        steps = [int(record["step"] or 0) for record in read_metrics(folder)]
        recorder = cls(folder, started_at, max(steps, default=0))
        recorder._resumed_after = None
        return recorder

    def step(self, step: int, metrics: Metrics, finished_at: float) -> None:
        """One training step, written at once; `finished_at` in seconds since the epoch, before any evaluation."""
        if self._startup_s is None:
            self._startup_s = finished_at - self.started_at
        self.steps, self._last = step, metrics
        self._note(metrics)
        self._write(metrics)

    def first_evaluation(self, metrics: Metrics) -> None:
        """The evaluation before training goes on, with the step that is done: 0 at first."""
        if len(metrics) > 1:
            self._note(metrics)
            self._write(metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A few rollouts of a step, as `samples/step-<step>.jsonl`.

        They are only to be looked at: where they cannot be written, the run goes on without them, after one warning. What
        JSON has nothing for is written as text.
        """
        try:
            place = own_folder(self.folder / "samples", below=self.folder)
            text = "".join(json.dumps(redacted_values(readable(row)), ensure_ascii=False) + "\n" for row in rows)
            write_text(place / f"step-{step:06d}.jsonl", text)
        except Exception as error:
            self._note_once(
                f"warning: the samples of step {step} cannot be written ({type(error).__name__}: {error}); the run goes on"
            )

    def close(self, status: str, error: str | None = None) -> None:
        """Writes `summary.json`; `status` is finished, interrupted or failed.

        Raises:
            OSError: after trying all of it: the metrics were deleted or are not whole, or the summary cannot be written.
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
        """Keeps what the summary will say of a record."""
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
    """Rollouts as a person reads them: prompt, response, reward with its parts; means over the response of the advantage
    and of the distance between the log-probs of sampler and trainer.
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
