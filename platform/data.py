"""Rows of a data set, and the order in which steps use them."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.platform.rewards import REWARDS, Sample


class DataError(ValueError):
    """A data set that cannot be used; the text names the file, the line or row, and the field."""


@dataclass(frozen=True)
class Row:
    """One row of a data set, before it is tokenised.

    Example: `Row(prompt="37+48=", answer="85", metadata={"source": "school"}, where="train.jsonl, line 3")`.
    """

    prompt: str | list[dict[str, str]]  # text, or chat messages
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)  # file and line or row; empty if from no file


def read_rows(path: str | Path, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Row]:
    """The rows of a .jsonl or .parquet file, in order; fields that are neither prompt nor answer become metadata.

    Raises DataError for a file or row that cannot be used. Lines and rows are counted from 1; blank lines are skipped.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file{_neighbour(path)}")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; data is read from {' or '.join(READERS)}")
    rows = [_row(record, where, prompt_key, answer_key) for where, record in reader(path)]
    if not rows:
        raise DataError(f"{path}: no rows in this file")
    return rows


def check_answers(rows: Sequence[Row], functions: Sequence[str]) -> None:
    """Refuses rows whose answers the built-in reward functions cannot grade, before training and not in the middle of it.

    Raises DataError naming the row and the function.
    """
    for row in rows:
        sample = Sample(prompt="", response="", answer=row.answer, response_tokens=0, truncated=False)
        for name in functions:
            try:
                REWARDS[name](sample)
            except ValueError as error:
                raise DataError(
                    f"{row.where}: reward function {name!r} cannot grade against this answer: {error}"
                ) from None


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either"
    names = [item.name for item in path.parent.iterdir() if item.suffix in READERS]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not valid UTF-8 (byte {error.start + 1} of the line)") from None
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}, column {error.colno}: not valid JSON ({error.msg})") from None
        yield where, record


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).strip()})") from None
    for number, record in enumerate(records, start=1):
        yield f"{path}, row {number}", record


READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _row(record: Any, where: str, prompt_key: str, answer_key: str) -> Row:
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with the fields of a row, got {_kind(record)}")
    for key, name in ((prompt_key, "data.prompt_key"), (answer_key, "data.answer_key")):
        if key not in record:
            there = ", ".join(repr(item) for item in record) or "none"
            raise DataError(f"{where}: no field {key!r} ({name}); fields here: {there}")
    prompt = record[prompt_key]
    if problem := _prompt_problem(prompt):
        raise DataError(f"{where}: field {prompt_key!r} {problem}")
    metadata = {key: value for key, value in record.items() if key not in (prompt_key, answer_key)}
    return Row(prompt=prompt, answer=record[answer_key], metadata=metadata, where=where)


def _prompt_problem(prompt: Any) -> str | None:
    if prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
        return "is empty"
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"must be text or a list of chat messages, got {_kind(prompt)}"
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            return f"must be text or a list of chat messages, but item {number} is {_kind(message)}"
        for part in ("role", "content"):
            if not isinstance(message.get(part), str):
                return f"has a chat message ({number}) whose {part!r} is {_kind(message.get(part))}, not text"
    return None


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    if value is None:
        return "nothing"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


@dataclass(frozen=True)
class DataOrder:
    """Which rows each step uses: shuffled passes over the data, joined end to end, so no batch is ever short.

    It has no state: what a step uses follows from its number alone, whatever ran before it and on however many ranks.

    Example: 1000 rows at 128 per step. Steps 0..7 use 1024 rows, so step 8 starts at row 24 of the second pass.
    """

    size: int  # rows of the data set
    prompts_per_step: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1 or self.prompts_per_step < 1:
            raise DataError(f"cannot draw {self.prompts_per_step} prompts per step from {self.size} rows")

    def rows_of_step(self, step: int) -> list[int]:
        """Row numbers of step 0, 1, 2, ..., in order."""
        return [self.row_of_group(position) for position in self.group_ids_of_step(step)]

    def group_ids_of_step(self, step: int) -> list[int]:
        """The group of each row of a step: its position in the endless stream, so no two groups of a run share one."""
        start = step * self.prompts_per_step
        return list(range(start, start + self.prompts_per_step))

    def row_of_group(self, group_id: int) -> int:
        """The row behind a group."""
        epoch, offset = divmod(group_id, self.size)
        return _permutation(self.size, self.seed, epoch)[offset] if self.shuffle else offset


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of one pass, the same in every process."""
    numbers = list(range(size))
    # Text seeds go through SHA-512, so neighbouring seeds and epochs have nothing in common.
    random.Random(f"tandem data order, seed {seed}, epoch {epoch}").shuffle(numbers)
    return tuple(numbers)
