"""Chat prompts that end with a message of the assistant: the beginning of a response, or one that says it all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.platform.data.prompts import ASSISTANT
from tandem.platform.data.rows import DataError, Row
from tandem.platform.rewards import grading
from tandem.platform.system.text import shorten

# What may stand behind an answer that ends a text: closing signs, closing tags, end tokens. Signs after which more is to
# come, such as a colon, are not among them.
_CLOSING = re.compile(r"(?:[\s.!?)\]}\"'*_$`…。！？”’]|\\[)\]]|</[\w-]+>|<\|[^|>]*\|>|</s>)+\Z")
_JOINED = r"[\w.,/+\-−^]"  # what makes a longer word or number of the answer when it stands right before it
_NUMBER = re.compile(rf"(?<!{_JOINED})[-+−]?\$?[\d.][\d.,/]*%?\Z")
_LABEL = re.compile(r"\b(?:step|case|problem|question|part|example|exercise|section|line)\s*#?\Z", re.IGNORECASE)
TAIL = 1000  # characters that closing signs and the words around an answer may take
MARGIN = 40  # characters that another spelling or a unit may take
_ANSWER_IS = re.compile(r"\banswer\b[^\w\n\\]*?(?:(?:is|=)\b[^\w\n\\]*?)?(?=[\w\\.\-−+])", re.IGNORECASE)


def check_beginnings(rows: Sequence[Row], source: str) -> None:
    """Refuses chats whose last message, which the policy would continue, gives the answer already.

    Args:
        source: names the data in messages about rows that come from no file.

    Raises:
        DataError: naming the row and its field.
    """
    for number, row in enumerate(rows, start=1):
        last = row.prompt[-1] if row.prompt and not isinstance(row.prompt, str) else {}
        content = str(last.get("content", ""))
        if last.get("role") == ASSISTANT and gives_answer(content, row.answer):
            where = row.where or f"{source}, row {number}"
            raise DataError(
                f"{where}: the last message of the prompt (field {row.prompt_key!r}) is the assistant's and gives the "
                f"answer (field {row.answer_key!r}, data.answer_key): {shorten(repr(content))} leaves nothing to find for "
                f"{shorten(repr(row.answer))}. Remove that message, or set data.prompt_key to a field without it; a "
                "policy can continue a beginning that breaks off before the answer"
            )


def gives_answer(text: str, answer: Any) -> bool:
    """Whether a text gives the reference answer, so that a policy which continues it has nothing left to find.

    It does if it ends with the answer, closing signs and tags aside, has it in its last box, or says that the answer is it.
    Case does not matter, and numbers are compared as numbers. Of a list or an object every item counts as an answer.
    """
    return any(_ends_with(text, gold) or _boxes(text, gold) or _names(text, gold) for gold in _golds(answer))


def _golds(answer: Any) -> Iterator[str]:
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list | tuple):
        for item in answer:
            yield from _golds(item)
    elif answer is not None and str(answer).strip():
        yield str(answer).strip()


def _ends_with(text: str, gold: str) -> bool:
    if text.strip().casefold() == gold.casefold() or _is_same(gold, text.strip()):
        return True
    body, end = _CLOSING.sub("", text[-len(gold) - TAIL :]), _CLOSING.sub("", gold)
    if not end:
        return False
    last = _NUMBER.search(body)
    if last and _LABEL.search(body[: last.start()]):
        return False
    return bool(last and _same_number(gold, last.group())) or bool(
        re.search(rf"(?<!{_JOINED}){re.escape(end)}\Z", body, re.IGNORECASE)
    )


def _boxes(text: str, gold: str) -> bool:
    box = grading.last_box(text)
    return box is not None and grading.equal(gold, box)


def _names(text: str, gold: str) -> bool:
    """Whether the text says "the answer is" and then this answer."""
    for cue in _ANSWER_IS.finditer(text):
        rest = text[cue.end() : cue.end() + len(gold) + TAIL]
        case = re.IGNORECASE if len(gold) > 1 else re.NOFLAG  # "the answer is a number" does not give A
        if re.match(rf"{re.escape(gold)}(?!\w|[.,/]\d)", rest, case):
            return True
        if _same_number(gold, _CLOSING.sub("", rest.split(maxsplit=1)[0])) or _is_same(gold, rest.partition("\n")[0]):
            return True
    return False


def _is_same(gold: str, given: str) -> bool:
    """Whether the texts are the same number, or but for spaces and spelling the same text."""
    given = given.rstrip(" .$*")
    return len(given) <= 2 * len(gold) + MARGIN and (
        _same_number(gold, given) or grading.normal(gold) == grading.normal(given)
    )


def _same_number(gold: str, given: str) -> bool:
    number, other = grading.number(gold), grading.number(given)
    return number is not None and other is not None and grading.equal_quantities(number, other)
