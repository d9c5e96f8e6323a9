"""The prompts of each training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.platform.batch import Prompt
from tandem.platform.data import DataOrder
from tandem.platform.prompts import EncodedRow


def as_prompt(row: EncodedRow, group_id: int) -> Prompt:
    """A row as the prompt of the group `group_id`."""
    return Prompt(ids=row.ids, group_id=group_id, text=row.text, answer=row.row.answer, metadata=row.row.metadata)


@dataclass(frozen=True)
class PromptSource:
    """Training prompts by step: a pure function of the step number, so a run can begin anywhere."""

    rows: Sequence[EncodedRow]
    order: DataOrder

    def prompts_of_step(self, step: int) -> list[Prompt]:
        """The prompts of step 1, 2, ...; each is a group of its own, keyed by its position in the stream."""
        rows, ids = self.order.rows_of_step(step - 1), self.order.group_ids_of_step(step - 1)
        return [as_prompt(self.rows[row], group) for row, group in zip(rows, ids, strict=True)]
