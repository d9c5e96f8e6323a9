"""The hf engine samples from the trained policy, whatever the model does with a cache and with padding."""

from __future__ import annotations

import torch
from hf_gaps import worst_gap
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2LMHeadModel

from tandem.workers.engines.hf import has_true_cache

CPU = torch.device("cpu")


def test_a_cache_that_counts_the_padding_is_not_used() -> None:
    """BART derives positions from the length of the cache, which includes padding; GPT-2 uses position_ids."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "max_position_embeddings": 64, "is_encoder_decoder": False}
    bart = BartForCausalLM(BartConfig(**sizes, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    for model in (bart, gpt2):
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.3)
    assert not has_true_cache(bart.eval(), CPU)
    assert has_true_cache(gpt2.eval(), CPU)
    assert worst_gap(bart) < 1e-4
    assert worst_gap(gpt2) < 1e-4
