"""The text of a response as a continuation of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 16  # last tokens of a prompt, usually enough context to decode its continuation
UNDECODED = "\ufffd"  # replaces the bytes of an incomplete character


class Continuation:
    """Decodes responses to one prompt: prompt text plus decoded response is the text of both token sequences together.

    Decoded alone, a response can lose its first characters: some tokenizers strip the leading space of a text, and a
    character can start in the prompt's last token and end in the response. Such a character belongs to the response.

    Example: `Continuation(tokenizer.decode, prompt.ids)(response_ids)` is " bad" after the prompt "Answer:".
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        """`decode` maps token ids to text. Only the end of a long prompt is decoded with each response."""
        self._decode, self._context = decode, _end(decode, list(prompt_ids))
        self._before = decode(self._context)

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of a response or of a prefix of one."""
        whole = self._decode([*self._context, *ids])
        for before in (self._before, self._before.rstrip(UNDECODED)):
            if whole.startswith(before):
                return whole[len(before) :]
        # The response changes the decoded prompt: some decoders replace a whole run of bytes if part of it is invalid.
        return self._decode(list(ids))


def _end(decode: Callable[[list[int]], str], ids: list[int]) -> list[int]:
    """The last tokens of a prompt: as few as decode alone to the same text as in the prompt and to more than spaces."""
    if len(ids) <= CONTEXT:
        return ids
    text, count = decode(ids), CONTEXT
    while count < len(ids):
        end = decode(ids[-count:])
        if end.strip() and not end.startswith(UNDECODED) and text.endswith(end):
            return ids[-count:]
        count *= 4
    return ids
