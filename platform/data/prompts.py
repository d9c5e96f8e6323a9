"""Encodes the prompts of rows as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tandem.platform.data.rows import DataError, Row
from tandem.platform.system.text import shorten

TELLING = 4  # number of last tokens used to find the end of a text
ASSISTANT = "assistant"  # the role that the policy plays in a chat


class ChatTokenizer(Protocol):
    """The required interface of a tokenizer (Hugging Face tokenizers have it)."""

    bos_token: Any
    bos_token_id: Any
    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """Returns `["input_ids"]` of a text, with or without the special tokens that the tokenizer adds."""
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
    text: str  # what the policy reads: the text of the row, or the chat as rendered by the template
    head: int = 0  # leading tokens that a cut prompt keeps: those that the tokenizer adds, or one BOS
    continues: bool = False  # whether it ends with an assistant message, which the policy continues


@dataclass(frozen=True)
class EncodedRows:
    """The usable rows, and the numbers of cut and dropped rows."""

    rows: list[EncodedRow]
    cut: int = 0
    dropped: int = 0

    @property
    def continued(self) -> int:
        """Number of prompts that end with an assistant message, which the policy continues."""
        return sum(row.continues for row in self.rows)


def encode_rows(
    rows: Sequence[Row], tokenizer: ChatTokenizer, max_prompt_tokens: int, overlong: str, source: str
) -> EncodedRows:
    """Tokenises prompts. Tokens that the tokenizer adds in front are kept (at most one BOS token); tokens that it adds
    behind, such as an end token, are dropped. Special tokens written in the text stay.

    If a chat ends with an assistant message, the policy continues that message.

    Args:
        overlong: what to do with a prompt of more than `max_prompt_tokens`: "error", "cut" (its end is kept), "drop".
        source: names the data in messages about rows that are not from a file.

    Raises:
        DataError: a prompt cannot be used; names the row and its field.
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
    if isinstance(row.prompt, str):
        return _encode_text(row, row.prompt, tokenizer, where)
    return _encode_chat(row, row.prompt, tokenizer, where)


def _encode_text(row: Row, text: str, tokenizer: ChatTokenizer, where: str) -> EncodedRow:
    with _named(where, f"the model's tokenizer cannot read the prompt (field {row.prompt_key!r})"):
        whole = tuple(tokenizer(text)["input_ids"])
        bare = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    head, ids = _without_end(whole, bare)
    if ids[:head] == ids[head : 2 * head]:  # the text already starts with these tokens
        ids = ids[head:]
    if not ids[head:]:
        raise DataError(
            f"{where}: the prompt has no tokens (field {row.prompt_key!r}: {shorten(repr(text))}); it needs at least one"
        )
    ids = _one_bos(ids, tokenizer)
    return EncodedRow(row, ids, text, max(head, int(_starts_with_bos(ids, tokenizer))))


def _without_end(whole: tuple[int, ...], bare: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(number of tokens that the tokenizer adds in front, the tokens of the text including these).

    `whole` includes all special tokens that the tokenizer adds, `bare` none. Their comparison shows which are added.
    """
    for head in range(len(whole) - len(bare) + 1):
        if whole[head : head + len(bare)] == bare:
            return head, whole[: head + len(bare)]
    # Without special tokens, the text itself is tokenised differently. Find its end by its last tokens.
    end = bare[-TELLING:]
    for stop in range(len(whole), len(end) - 1, -1):
        if whole[stop - len(end) : stop] == end:
            return 0, whole[:stop]
    return 0, bare


def _encode_chat(row: Row, messages: list[dict[str, Any]], tokenizer: ChatTokenizer, where: str) -> EncodedRow:
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the prompt (field {row.prompt_key!r}) is a list of chat messages, but the model's tokenizer has no "
            "chat template; set model.path to a chat model, or give prompts as text"
        )
    continues = messages[-1].get("role") == ASSISTANT
    if continues:
        _refuse_tool_call(row, messages[-1], where)
    if continues and not str(messages[-1].get("content", "")).strip():
        messages, continues = messages[:-1], False  # an empty message only opens the assistant's turn
    with _named(where, f"the model's chat template cannot render the messages (field {row.prompt_key!r})"):
        # Render and tokenise in one call: the template writes all special tokens, and the tokenizer must add none.
        end = {"continue_final_message": True, "add_generation_prompt": False}
        options = end if continues else {"add_generation_prompt": True}
        ids = tuple(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))
        ids = _one_bos(ids, tokenizer)
        text = str(tokenizer.decode(list(ids)))
    if not ids:
        raise DataError(
            f"{where}: the prompt has no tokens (field {row.prompt_key!r}: the chat template renders to nothing); it needs "
            "at least one"
        )
    return EncodedRow(row, ids, text, int(_starts_with_bos(ids, tokenizer)), continues)


def _refuse_tool_call(row: Row, message: dict[str, Any], where: str) -> None:
    if message.get("tool_calls"):
        raise DataError(
            f"{where}: the last message of the prompt (field {row.prompt_key!r}) is a tool call of the assistant, which "
            "the policy cannot continue; add the tool's message, or remove the call"
        )


@contextmanager
def _named(where: str, what: str) -> Iterator[None]:
    """Converts any exception of a template or tokenizer into a DataError that names the row."""
    try:
        yield
    except BaseException as error:
        # A panic in the Rust code of a tokenizer is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{where}: {what}: {type(error).__name__}: {shorten(str(error), 400)}") from error


def _one_bos(ids: tuple[int, ...], tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Removes duplicate leading BOS tokens: the text may contain one, and the tokenizer may add another."""
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == (bos, bos):
        ids = ids[1:]
    return ids


def _starts_with_bos(ids: tuple[int, ...], tokenizer: ChatTokenizer) -> bool:
    return tokenizer.bos_token_id is not None and ids[:1] == (tokenizer.bos_token_id,)


def _shorten(item: EncodedRow, tokenizer: ChatTokenizer, limit: int) -> EncodedRow:
    """Cuts a prompt to `limit` tokens: keeps its end, and its leading tokens if they leave room for more."""
    head = item.ids[: item.head] if item.head < limit else ()
    ids = head + item.ids[len(item.ids) - (limit - len(head)) :]
    return replace(item, ids=ids, text=str(tokenizer.decode(list(ids))), head=len(head))


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
        "data.overlong_prompt=drop drops them all; raise data.max_prompt_tokens"
    )
