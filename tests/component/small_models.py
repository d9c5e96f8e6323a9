"""Models small enough to create in a test."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config


def small_config(vocab_size: int, hidden: int = 16, **changes: Any) -> Qwen2Config:
    """A Qwen2 config with one layer and two heads, with the given vocabulary and width."""
    own = {"num_hidden_layers": 1, "max_position_embeddings": 1024, **changes}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2Config(vocab_size=vocab_size, hidden_size=hidden, intermediate_size=2 * hidden, **heads, **own)
