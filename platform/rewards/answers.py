"""Checks whether the answers of data rows can be graded."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.platform.data.rows import DataError, Row
from tandem.platform.rewards.functions import REWARDS, Sample
from tandem.platform.system.user_code import describe_exception


def check_answers(rows: Sequence[Row], functions: Sequence[str]) -> None:
    """Refuses rows whose answers the built-in reward functions cannot grade, before training starts.

    Raises:
        DataError: an answer cannot be graded; names the row and the function.
    """
    for row in rows:
        sample = Sample(prompt="", response="", answer=row.answer, response_tokens=0, truncated=False)
        for name in functions:
            function = REWARDS[name]
            try:
                function(sample)
            except Exception as error:
                problem = str(error) if isinstance(error, ValueError) else describe_exception(error)
                raise DataError(
                    f"{row.where}: reward function {name!r} cannot grade this answer (field {row.answer_key!r}): {problem}"
                ) from error
