"""Loads tokenizers as they were saved."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from tandem.platform.config import ConfigError
from tandem.workers.models import cannot_load

AS_SAVED = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that are all in their tokenizer.json


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub name.

    For some model types, Qwen2 among them, AutoTokenizer puts the type's usual tokenizer in the place of the one that
    was saved, without a word; a character tokenizer then loses its spaces.

    Raises:
        ConfigError: there is none that can be read.
    """
    try:
        tokenizer = _load(path, trust_remote_code)
    except (OSError, ValueError) as error:
        raise cannot_load(f"the tokenizer of {path}", path, error) from error
    # Where the files are missing, transformers makes up a tokenizer that knows special tokens alone.
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        raise ConfigError(f"the tokenizer of {path} knows no token. Copy its files (tokenizer.json, ...) beside the model")
    return tokenizer


def _load(path: str, trust_remote_code: bool) -> Any:
    if get_tokenizer_config(path).get("tokenizer_class") in AS_SAVED:
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
