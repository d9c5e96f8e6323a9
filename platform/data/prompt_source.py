"""The prompts of each round of sampling."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tandem.platform.data.prompts import EncodedRow
from tandem.platform.data.rows import DataOrder
from tandem.platform.experience.batch import Prompt


def as_prompt(row: EncodedRow, group_id: int) -> Prompt:
    """The prompt of a row, with the group id `group_id`."""
    return Prompt(ids=row.ids, group_id=group_id, text=row.text, answer=row.row.answer, metadata=row.row.metadata)


@dataclass(frozen=True)
class PromptSource:
    """Training prompts by round. The prompts are a pure function of the round number, so a run can start at any round.

    A step takes one round, or more with dynamic sampling.
    """

    rows: Sequence[EncodedRow]
    order: DataOrder

    @cached_property
    def digest(self) -> str:
        """A digest that depends on every prompt, every answer, and their order."""
        hasher = hashlib.sha256()
        for row in self.rows:
            hasher.update(f"{row.ids} {row.row.answer!r}\n".encode())
        return hasher.hexdigest()

    def prompt_of_group(self, group_id: int) -> Prompt:
        """The prompt of a group."""
        return as_prompt(self.rows[self.order.row_of_group(group_id)], group_id)

    def prompts_of_round(self, number: int) -> list[Prompt]:
        """The prompts of round `number`, counted from 1. Each is a separate group; its id is its position in the stream."""
        return [self.prompt_of_group(group) for group in self.order.group_ids_of_step(number - 1)]
