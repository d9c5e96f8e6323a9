"""What the models of an arm are made of, and what the machine can multiply."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from tandem.platform.costs import ModelShape


def shape_of(path: str, trust_remote_code: bool = False, values: bool = False) -> ModelShape:
    """The shape of the decoder at `path`, from its configuration alone; `values`: with a value head."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        body: Any = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    embeddings = {id(module.weight) for module in body.modules() if isinstance(module, nn.Embedding)}
    blocks = sum(p.numel() for p in body.parameters() if p.dim() >= 2 and id(p) not in embeddings)
    return ModelShape(text.num_hidden_layers, width, blocks, text.hidden_size * (1 if values else text.vocab_size))


def parameters_of(path: str, trust_remote_code: bool = False) -> int:
    """Parameters of the causal language model at `path`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def measured_peak(dtype: str, size: int | None = None, trials: int = 5) -> float:
    """Operations per second of the fastest of some products of two square matrices, on one GPU or on all cores."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size or (8192 if device.type == "cuda" else 2048)  # a small one would measure the launch of its kernel
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    one = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    best = float("inf")
    for _ in range(trials):
        start = time.perf_counter()
        float((one @ one)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * size**3 / best
