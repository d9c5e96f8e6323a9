"""From rows to prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.platform.data import DataError, Row


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer (Hugging Face tokenizers have all of it)."""

    bos_token: Any
    bos_token_id: Any
    chat_template: Any

    def __call__(self, text: str) -> Any:
        """`["input_ids"]` of a text, with the special tokens that the tokenizer adds."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The token ids of chat messages."""
        ...

    def decode(self, token_ids: Any) -> Any:
        """The text of token ids."""
        ...


@dataclass(frozen=True)
class EncodedRow:
    """A row with its prompt as tokens.

    Example: `EncodedRow(row=Row("3+4=", "7"), ids=(6, 13, 7, 14), text="3+4=")`.
    """

    row: Row
    ids: tuple[int, ...]
    text: str  # what the policy reads: the row's text, or the chat as its template renders it


@dataclass(frozen=True)
class EncodedRows:
    """The rows that can be used, and how many were not used as they are."""

    rows: list[EncodedRow]
    cut: int = 0
    dropped: int = 0


def encode_rows(
    rows: Sequence[Row], tokenizer: ChatTokenizer, max_prompt_tokens: int, overlong: str, source: str
) -> EncodedRows:
    """Tokenises prompts, each with one BOS token at most.

    `overlong` says what happens to a prompt of more than `max_prompt_tokens`: "error", "cut" (its end is kept), "drop".
    `source` names the data in messages about rows that come from no file. Raises DataError naming the row.
    """
    encoded: list[EncodedRow] = []
    cut = dropped = 0
    for number, row in enumerate(rows, start=1):
        where = row.where or f"{source}, row {number}"
        item = _encode(row, tokenizer, where)
        if len(item.ids) > max_prompt_tokens:
            if overlong == "drop":
                dropped += 1
                continue
            if overlong == "error":
                raise DataError(_overlong(where, len(item.ids), max_prompt_tokens))
            item, cut = _shorten(item, tokenizer, max_prompt_tokens), cut + 1
        encoded.append(item)
    if not encoded:
        raise DataError(_none_left(source, dropped, max_prompt_tokens))
    return EncodedRows(encoded, cut=cut, dropped=dropped)


def _encode(row: Row, tokenizer: ChatTokenizer, where: str) -> EncodedRow:
    ids = _text_ids(row.prompt, tokenizer) if isinstance(row.prompt, str) else _chat_ids(row.prompt, tokenizer, where)
    if not ids:
        raise DataError(f"{where}: the prompt has no tokens ({row.prompt!r}); a prompt needs at least one")
    text = row.prompt if isinstance(row.prompt, str) else str(tokenizer.decode(list(ids)))
    return EncodedRow(row=row, ids=ids, text=text)


def _text_ids(text: str, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    return _one_bos(tuple(tokenizer(text)["input_ids"]), tokenizer)


def _chat_ids(messages: list[dict[str, str]], tokenizer: ChatTokenizer, where: str) -> tuple[int, ...]:
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the prompt is a list of chat messages, but the model's tokenizer has no chat template; "
            "set model.path to a chat model, or give prompts as text"
        )
    # Rendered and tokenised in one call: the template owns the special tokens, and none are added to its text.
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return _one_bos(tuple(ids), tokenizer)


def _one_bos(ids: tuple[int, ...], tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """At most one leading BOS: a text that brings its own gets another from a tokenizer that adds one."""
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == (bos, bos):
        ids = ids[1:]
    return ids


def _shorten(item: EncodedRow, tokenizer: ChatTokenizer, limit: int) -> EncodedRow:
    """The end of a prompt, behind its BOS token if it had one."""
    bos = tokenizer.bos_token_id
    head = item.ids[:1] if bos is not None and item.ids[0] == bos and limit > 1 else ()
    ids = head + item.ids[len(item.ids) - (limit - len(head)) :]
    return EncodedRow(row=item.row, ids=ids, text=str(tokenizer.decode(list(ids))))


def _overlong(where: str, tokens: int, limit: int) -> str:
    return (
        f"{where}: the prompt has {tokens} tokens, more than data.max_prompt_tokens={limit}; set "
        f"data.max_prompt_tokens={tokens} or more, or data.overlong_prompt=cut (keeps its end) or drop (leaves it out)"
    )


def _none_left(source: str, dropped: int, limit: int) -> str:
    if not dropped:
        return f"{source}: no rows"
    return (
        f"{source}: all {dropped} prompts have more than data.max_prompt_tokens={limit} tokens and "
        "data.overlong_prompt=drop leaves none; raise data.max_prompt_tokens"
    )
