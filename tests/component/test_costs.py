"""Operations that are said to be needed, against those that torch counts, and against arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from tandem.benchmarks.ab.shapes import measured_peak, parameters_of, shape_of
from tandem.platform.config import ModelConfig
from tandem.platform.costs import ModelShape, StepSize, share_of_peak, step_flops
from tandem.workers.models import load_critic, load_policy


@pytest.mark.parametrize("values", [False, True])
def test_a_forward_pass_is_what_torch_counts(tiny_path: str, values: bool) -> None:
    """4 rows of 9 tokens, each attending to 9. The scale of the scores and the rotary embedding are no matrix products."""
    rows, length = 4, 9
    model = load_critic(tiny_path, ModelConfig()) if values else load_policy(tiny_path, ModelConfig())
    (model.body if values else model).set_attn_implementation("eager")  # torch counts nothing for the fused kernel of a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 9, (rows, length)), attention_mask=torch.ones(rows, length, dtype=torch.long))
    tokens = rows * length
    expected = shape_of(tiny_path, values=values).forward(tokens, tokens * length, tokens)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_matrices_count_whatever_holds_them(tmp_path: Path) -> None:
    """GPT-2 has no linear layers: a block is 12 squares of the width, in modules of its own kind."""
    GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32).save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)) == ModelShape(2, 16, 2 * 12 * 16**2, 16 * 50)


def test_parameters_are_those_of_the_loaded_model(tiny_path: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(tiny_path)
    assert parameters_of(tiny_path) == sum(parameter.numel() for parameter in loaded.parameters())


def test_a_step_by_hand() -> None:
    """One layer of width 1 with 10 parameters, a head of 5; 2 prompts of 4 tokens, 3 samples each with 3 response tokens.

    A pass over all: 6 x 7 = 42 tokens attending to 42 x 7 = 294: 2 x 10 x 42 + 4 x 294 + 2 x 5 x 42 = 2436.
    Reading the prompts: 8 tokens, context 32, 2 outputs: 160 + 128 + 20 = 308. Decoding: 2 more tokens of each sample,
    which see 5 and 6 before and with them: 12 tokens, context 6 x 11 = 66: 240 + 264 + 120 = 624.
    """
    actor = ModelShape(layers=1, attention_width=1, block_parameters=10, head_parameters=5)
    critic = ModelShape(layers=1, attention_width=1, block_parameters=10, head_parameters=1)
    size = StepSize(prompts=2, sampled=6, trained=6, prompt_tokens=4, response_tokens=3)
    found = step_flops(size, actor, critic, reference=True, epochs=(2, 2))
    value = 2 * 10 * 42 + 4 * 294 + 2 * 1 * 42
    assert found == {
        "generate": 308 + 12 * 20 + 4 * 66 + 12 * 10,
        "infer_old": 2436,
        "infer_reference": 2436,
        "infer_values": value,
        "update_critic": 6 * value,
        "update_actor": 6 * 2436,
    }
    assert step_flops(size, actor, None, reference=False, recompute=True).keys() == {
        "generate",
        "infer_old",
        "update_actor",
    }
    assert step_flops(size, actor, None, reference=False, recompute=True)["update_actor"] == 4 * 2436


def test_share_of_the_peak() -> None:
    assert share_of_peak({"generate": 10.0, "infer_old": 4.0}, {"generate": 2.0}, peak=20.0) == {"generate": 0.25}


def test_the_peak_is_a_rate() -> None:
    assert 1e8 < measured_peak("float32", size=256) < 1e15
