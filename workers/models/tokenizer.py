"""Loads tokenizers exactly as saved, and compares them."""

from __future__ import annotations

import json
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from tandem.platform.config.schema import ConfigError
from tandem.workers.models.loading import cannot_load

AS_SAVED = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that tokenizer.json defines completely

PROBES = (
    "a",
    " A b  c\n\t12,345.67",
    "<s>[INST] Hé日🙂\u200b [/INST]</s><|im_end|>",
)  # spaces, digits, bytes, special tokens


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name.

    For some model types, such as Qwen2, AutoTokenizer silently replaces the saved tokenizer with the type's default. A
    character tokenizer would then lose its spaces.

    Raises:
        ConfigError: there is no readable tokenizer.
    """
    try:
        tokenizer = _load(path, trust_remote_code)
    except Exception as error:  # the library that reads tokenizer.json raises nothing more precise
        raise cannot_load(f"the tokenizer of {path}", path, error) from error
    # If files are missing, transformers creates a tokenizer that has only special tokens.
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        raise ConfigError(f"the tokenizer of {path} has no tokens. Copy its files (tokenizer.json, ...) beside the model")
    return tokenizer


def encode_alike(one: Any, other: Any) -> bool:
    """Whether two tokenizers encode every text to the same ids, special tokens included.

    Compares vocabularies and rules. Compares added special tokens on example texts, because their rules can be written in
    several ways. Padding, truncation and decoding do not matter.
    """
    if one.get_vocab() != other.get_vocab() or _rules(one) != _rules(other):
        return False
    return all(one(text)["input_ids"] == other(text)["input_ids"] for text in PROBES)


def _rules(tokenizer: Any) -> dict[str, Any]:
    """The rules by which a fast tokenizer splits texts; empty for other tokenizers, which only the examples compare."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return {}
    rules = json.loads(core.to_str())
    return {name: rules.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def _load(path: str, trust_remote_code: bool) -> Any:
    if get_tokenizer_config(path).get("tokenizer_class") in AS_SAVED:
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
