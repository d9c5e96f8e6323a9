"""Tokenizers of the kinds in released models, small enough to create in a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("the", "The", "answer", "Answer", "is", "bad", "good", "user", "Hello", "world", "do", "42")
BYTES = tuple(f"<0x{number:02X}>" for number in range(256))


def _added(front: str, behind: str, ids: dict[str, int]) -> Any:
    """A post-processor that puts these special tokens before and after a text."""
    named = [(token, ids[token]) for token in dict.fromkeys(f"{front} {behind}".split())]
    return processors.TemplateProcessing(single=f"{front} $A {behind}".strip(), special_tokens=named)


def sentencepiece_like(front: str = "<s>", behind: str = "", words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Like Llama 2's: words begin with their space, a space is added before the text, other characters become bytes."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", *(f"▁{word}" for word in words), *words, *":.,!?'\n"]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    ranked = [(piece, 0.0 if piece.startswith("<") else -1.0 - 1.0 / len(piece)) for piece in ids]
    core = Tokenizer(models.Unigram(ranked, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    if front or behind:
        core.post_processor = _added(front, behind, ids)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level(front: str = "", behind: str = "") -> PreTrainedTokenizerFast:
    """Like GPT-2's: every byte is a token, and the same token begins and ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    core = Tokenizer(models.BPE(ids, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    if front or behind:
        core.post_processor = _added(front, behind, ids)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|end|>", eos_token="<|end|>")


def bert_like() -> PreTrainedTokenizerFast:
    """Like BERT's: lower case, pieces of words, [CLS] before and [SEP] after the text, no begin token."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str.lower, WORDS), "##s", *".,:?'"]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    core = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    core.post_processor = _added("[CLS]", "[SEP]", ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]"
    )
