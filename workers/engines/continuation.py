"""The text of a response, as it goes on from its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 16  # last tokens of a prompt that usually say how its text goes on
UNDECODED = "\ufffd"  # stands for the bytes of a character that is not complete


class Continuation:
    """Decodes responses to one prompt: what has to be appended to the prompt's text to give that of both together.

    Decoded alone, a response may lose what ties it to the prompt: the space in front of its first word, where words begin
    with their space and a text does not, or a character that began in the prompt. That character is the response's.

    Example: `Continuation(tokenizer.decode, prompt.ids)(response_ids)` is " bad" behind "Answer:".
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> None:
        """`decode` gives the text of token ids; of a long prompt only the end is decoded with every response."""
        self._decode, self._context = decode, _end(decode, list(prompt_ids))
        self._before = decode(self._context)

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of a response, or of its first tokens."""
        whole = self._decode([*self._context, *ids])
        for before in (self._before, self._before.rstrip(UNDECODED)):
            if whole.startswith(before):
                return whole[len(before) :]
        # The response changes how the prompt itself reads: some decoders give up on a whole run of bytes.
        return self._decode(list(ids))


def _end(decode: Callable[[list[int]], str], ids: list[int]) -> list[int]:
    """The last tokens of a prompt, as few as read alone as they do in the prompt and hold more than spaces."""
    if len(ids) <= CONTEXT:
        return ids
    text, count = decode(ids), CONTEXT
    while count < len(ids):
        end = decode(ids[-count:])
        if end.strip() and not end.startswith(UNDECODED) and text.endswith(end):
            return ids[-count:]
        count *= 4
    return ids
