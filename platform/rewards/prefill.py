"""Chat prompts that end with an assistant message: refuses messages that already give the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.platform.data.prompts import ASSISTANT
from tandem.platform.data.rows import DataError, Row
from tandem.platform.rewards import grading
from tandem.platform.system.text import shorten

# What may follow an answer at the end of a text: closing punctuation, closing tags, end tokens. Signs that announce more
# text, such as a colon, are not included.
_CLOSING = re.compile(r"(?:[\s.!?)\]}\"'*_$`…。！？”’]|\\[)\]]|</[\w-]+>|<\|[^|>]*\|>|</s>)+\Z")
_JOINED = r"[\w.,/+\-−^]"  # a character directly before the answer that makes it part of a longer word or number
_NUMBER = re.compile(rf"(?<!{_JOINED})[-+−]?\$?[\d.][\d.,/]*%?\Z")
_LABEL = re.compile(r"\b(?:step|case|problem|question|part|example|exercise|section|line)\s*#?\Z", re.IGNORECASE)
TAIL = 1000  # characters allowed for closing signs and the words around an answer
MARGIN = 40  # characters allowed for a different spelling or a unit
_ANSWER_IS = re.compile(r"\banswer\b[^\w\n\\]*?(?:(?:is|=)\b[^\w\n\\]*?)?(?=[\w\\.\-−+])", re.IGNORECASE)


def check_beginnings(rows: Sequence[Row], source: str) -> None:
    """Refuses chats whose last message, which the policy would continue, already gives the answer.

    Args:
        source: names the data in messages about rows that are not from a file.

    Raises:
        DataError: a message gives the answer; names the row and its field.
    """
    for number, row in enumerate(rows, start=1):
        last = row.prompt[-1] if row.prompt and not isinstance(row.prompt, str) else {}
        content = str(last.get("content", ""))
        if last.get("role") == ASSISTANT and gives_answer(content, row.answer):
            where = row.where or f"{source}, row {number}"
            raise DataError(
                f"{where}: the last message of the prompt (field {row.prompt_key!r}) is the assistant's and gives the "
                f"answer (field {row.answer_key!r}, data.answer_key): {shorten(repr(content))} already contains "
                f"{shorten(repr(row.answer))}. Remove that message, or set data.prompt_key to a field without it; the "
                "policy can continue a message that stops before the answer"
            )


def gives_answer(text: str, answer: Any) -> bool:
    """Whether a text already gives the reference answer, so that a policy that continues it has nothing left to solve.

    True if the text ends with the answer (ignoring closing signs and tags), has it in its last box, or says "the answer is"
    before it. Case is ignored, and numbers are compared as numbers. Every item of a list or object counts as an answer.
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
    """Whether the text contains "the answer is" followed by this answer."""
    for cue in _ANSWER_IS.finditer(text):
        rest = text[cue.end() : cue.end() + len(gold) + TAIL]
        case = re.IGNORECASE if len(gold) > 1 else re.NOFLAG  # "the answer is a number" does not give A
        if re.match(rf"{re.escape(gold)}(?!\w|[.,/]\d)", rest, case):
            return True
        if _same_number(gold, _CLOSING.sub("", rest.split(maxsplit=1)[0])) or _is_same(gold, rest.partition("\n")[0]):
            return True
    return False


def _is_same(gold: str, text: str) -> bool:
    """Whether the texts are the same number, or the same text except for spaces and spelling."""
    text = text.rstrip(" .$*")
    return len(text) <= 2 * len(gold) + MARGIN and (
        _same_number(gold, text) or grading.normal(gold) == grading.normal(text)
    )


def _same_number(gold: str, text: str) -> bool:
    number, other = grading.number(gold), grading.number(text)
    return number is not None and other is not None and grading.equal_quantities(number, other)
