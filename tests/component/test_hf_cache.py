"""The hf engine samples from the policy that is trained, whatever the model does with a cache and with padding."""

from __future__ import annotations

import pytest
import torch
from causal_types import EveryType
from transformers import BartConfig, BartForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tandem.platform.batch import Prompt
from tandem.platform.logprobs import token_logprobs
from tandem.platform.protocols import Sampling
from tandem.workers.hf_engine import HFEngine, has_true_cache

CPU = torch.device("cpu")
PROMPTS = [Prompt((5, 9, 13, 7, 8, 21, 30), 0, ""), Prompt((11,), 1, ""), Prompt((4, 5, 6), 2, "")]
LOOKS_AHEAD = {"cpmant", "xlnet"}
"""No trainer takes them: `check_passes` refuses them."""


class Loaded(HFEngine):
    """An engine around a model that is there already; nothing ends a response but its length."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device, self.max_rows = model.eval(), CPU, 64
        self.stop_ids, self.stop = set(), ()
        self._set_up()


def worst_gap(model: PreTrainedModel) -> float:
    """Nats between the log-probs of sampled tokens and those of a pass over each whole sequence by itself."""
    sampled = Loaded(model).generate(PROMPTS, Sampling(2, 1.0, 6, (0,)))
    gaps = []
    for number, one in enumerate(sampled):
        prompt = PROMPTS[number // 2].ids
        tokens = torch.tensor([[*prompt, *one.ids]])
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        expected = token_logprobs(logits, tokens, 1.0)[0, len(prompt) :]
        gaps.append(float((expected - torch.tensor(one.logprobs)).abs().max()))
    return max(gaps)


@pytest.mark.slow
def test_every_causal_model_type_is_sampled_as_it_is_scored(every_type: EveryType) -> None:
    gaps = {kind: worst_gap(model) for kind, (_, model) in every_type.items() if kind not in LOOKS_AHEAD}
    assert {kind: gap for kind, gap in gaps.items() if not gap < 1e-4} == {}
    assert len(gaps) >= 130


def test_a_cache_that_counts_the_padding_is_not_used() -> None:
    """BART's positions follow the length of the cache, padding included; GPT-2's follow position_ids."""
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
