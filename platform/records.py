"""What a run leaves behind: `metrics.jsonl`, `summary.json` and `samples/`, written so that nothing done is lost."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.platform.redact import redacted, redacted_values

if TYPE_CHECKING:  # records can be closed without torch
    from tandem.platform.batch import Rollout, Score
    from tandem.platform.metrics import Metrics

Record = dict[str, float | int | None]
"""A line of `metrics.jsonl`."""
MAX_DEPTH = 64  # lists and objects of a sample within each other
LARGEST_BITS = 10_000  # of a whole number; Python writes none of more than 4300 digits


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_text(path: Path, content: str) -> None:
    """Writes text whole or not at all."""
    draft = path.with_name(path.name + ".part")
    # Half a surrogate pair, which no file takes, becomes \udXXX; in JSON that means the same.
    draft.write_text(content, encoding="utf-8", errors="backslashreplace")
    os.replace(draft, path)


def records_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` up to a step, null as NaN; a last line that was cut off is none."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= step:
            kept.append({name: math.nan if value is None else value for name, value in record.items()})
    return kept


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
        if before.exists() and resumed_after is not None:
            kept = records_until(before, resumed_after)
            for record in kept:
                self._note(record)
                self._last = record if "reward/mean" in record else self._last
            write_text(before, "".join(json.dumps(plain(record)) + "\n" for record in kept))
        self._metrics = before.open("a", buffering=1)

    @classmethod
    def of_ended(cls, folder: Path, started_at: float) -> Recorder:
        """For a run whose process ended before it closed its records: with what they hold."""
        steps = [int(record["step"]) for record in records_until(folder / "metrics.jsonl", sys.maxsize)]
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
            (self.folder / "samples").mkdir(exist_ok=True)
            text = "".join(json.dumps(redacted_values(readable(row)), ensure_ascii=False) + "\n" for row in rows)
            write_text(self.folder / "samples" / f"step-{step:06d}.jsonl", text)
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
            if name.startswith("memory/") and name.endswith("/peak_bytes"):
                role = name.split("/")[1]
                self._peak[role] = max(self._peak.get(role, 0), int(value))
        measured = {name: value for name, value in metrics.items() if name.startswith("eval/")}
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
