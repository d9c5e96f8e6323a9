"""The rows of a data set, and the order in which steps use them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.platform.data.datafile import DataError as DataError
from tandem.platform.data.datafile import read_records
from tandem.platform.system.readers import kind_of


@dataclass(frozen=True)
class Row:
    """One row of a data set, before it is tokenised.

    Example: `Row(prompt="37+48=", answer="85", metadata={"source": "school"}, where="train.jsonl, line 3")`.
    """

    prompt: str | list[dict[str, Any]]  # text, or chat messages
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)  # file and line or row; empty if the row is not from a file
    prompt_key: str = field(default="prompt", compare=False)  # field of the prompt
    answer_key: str = field(default="answer", compare=False)  # field of the answer


def read_rows(path: str | Path, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Row]:
    """The rows of a .jsonl or .parquet file, in order. Fields that are neither prompt nor answer become metadata.

    Both file formats give the same prompts, answers and metadata: a null field is treated as absent, at the top level and
    in every nested object (a chat message, a tool call). The answer may be null or absent in some rows, but not in all.
    Lines and rows are counted from 1; blank lines are skipped.

    Raises:
        DataError: the file or a row cannot be used; the text names file, line or row, and field.
    """
    path = Path(path)
    records = list(read_records(path))
    if not records:
        raise DataError(f"{path}: no rows in this file")
    if not any(answer_key in record for _, record in records):
        raise _no_field(records[0][1], records[0][0], answer_key, "data.answer_key")
    return [_row(record, where, prompt_key, answer_key) for where, record in records]


def _row(record: Mapping[str, Any], where: str, prompt_key: str, answer_key: str) -> Row:
    if prompt_key not in record:
        raise _no_field(record, where, prompt_key, "data.prompt_key")
    prompt = record[prompt_key]
    if problem := _prompt_problem(prompt):
        raise DataError(f"{where}: field {prompt_key!r} {problem}")
    others = {key: value for key, value in record.items() if key not in (prompt_key, answer_key) and value is not None}
    return Row(prompt, record.get(answer_key), others, where, prompt_key, answer_key)


def _no_field(record: Mapping[str, Any], where: str, key: str, name: str) -> DataError:
    present = ", ".join(repr(item) for item in record) or "none"
    return DataError(f"{where}: no field {key!r} ({name}); fields here: {present}")


def _prompt_problem(prompt: Any) -> str | None:
    if prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
        return "is empty"
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"must be text or a list of chat messages, got {kind_of(prompt)}"
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict):
            return f"must be text or a list of chat messages, but item {number} is {kind_of(message)}"
        for part in ("role", "content"):
            if part == "content" and message.get("tool_calls") and part not in message:
                continue  # a message with tool calls needs no content
            if not isinstance(message.get(part), str):
                return f"has a chat message ({number}) whose {part!r} is {kind_of(message.get(part))}, not text"
    return None


@dataclass(frozen=True)
class DataOrder:
    """The rows of each step: shuffled passes over the data, concatenated, so every batch is full.

    It has no state: the rows of a step depend only on its number, not on earlier steps or the number of ranks.

    Example: 1000 rows at 128 per step. Steps 0..7 use 1024 rows, so step 8 starts at row 24 of the second pass.
    """

    size: int  # rows of the data set
    prompts_per_step: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1 or self.prompts_per_step < 1:
            raise DataError(f"cannot draw {self.prompts_per_step} prompts per step from {self.size} rows")

    def group_ids_of_step(self, step: int) -> list[int]:
        """The group id of each row of a step: its position in the endless stream, which is unique within a run."""
        start = step * self.prompts_per_step
        return list(range(start, start + self.prompts_per_step))

    def row_of_group(self, group_id: int) -> int:
        """The row number of a group."""
        epoch, offset = divmod(group_id, self.size)
        return _permutation(self.size, self.seed, epoch)[offset] if self.shuffle else offset


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of rows in one pass, the same in every process."""
    numbers = list(range(size))
    # `random` hashes text seeds with SHA-512, so neighbouring seeds and epochs give unrelated orders.
    random.Random(f"tandem data order, seed {seed}, epoch {epoch}").shuffle(numbers)
    return tuple(numbers)
