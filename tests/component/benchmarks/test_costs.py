"""Estimated operations, compared with the operations that torch counts and with arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from tandem.benchmarks.ab.shapes import measured_peak, parameters_of, shape_of
from tandem.platform.config.schema import ModelConfig
from tandem.platform.planning.costs import ModelShape, Peak, StepSize, share_of_peak, share_problem, step_flops
from tandem.workers.models.loading import load_critic, load_policy


@pytest.mark.parametrize("values", [False, True])
def test_a_forward_pass_is_what_torch_counts(tiny_path: str, values: bool) -> None:
    """4 rows of 9 tokens, each attending to 9; scaling of scores and rotary embedding are not matrix products."""
    rows, length = 4, 9
    model = load_critic(tiny_path, ModelConfig()) if values else load_policy(tiny_path, ModelConfig())
    (model.body if values else model).set_attn_implementation("eager")  # torch counts nothing for the fused kernel of a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 9, (rows, length)), attention_mask=torch.ones(rows, length, dtype=torch.long))
    tokens = rows * length
    expected = shape_of(tiny_path, values=values).forward(tokens, tokens * length, tokens)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_matrices_count_whatever_holds_them(tmp_path: Path) -> None:
    """GPT-2 has no linear layers: a block has 12 x width^2 parameters in modules of GPT-2's own class."""
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


def test_the_peak_is_a_rate_of_repeated_measurements() -> None:
    peak = measured_peak("float32", size=256, trials=3)
    assert 1e8 < peak.median <= peak.flops < 1e15
    assert peak.trials == 3
    assert 0 <= peak.others <= 1


def test_a_peak_by_hand() -> None:
    """Of 80, 100 and 90, the best is 100; the median is 90, which is 10 % less."""
    peak = Peak.of([80.0, 100.0, 90.0], others=0.05, load_average=0.3)
    assert peak == Peak(100.0, 90.0, pytest.approx(0.1), 3, 0.05, 0.3)
    assert peak.problem() is None
    assert "best 100, median 80" in str(Peak.of([80.0, 80.0, 100.0], 0.0, 0.0).problem())
    assert "beside other processes, on 50% of the cores" in str(Peak.of([80.0], 0.5, 2.0).problem())


@pytest.mark.parametrize(
    ("share", "noisy", "others", "problem"),
    [
        (0.5, False, 0.0, None),
        (0.5, False, None, None),
        (1.0, False, 0.1, None),
        (1.24, False, 0.0, "over 100 %, which cannot be"),
        (0.5, False, 0.3, "timed beside other processes, on 30% of the cores"),
        (0.5, True, 0.0, "the peak was measured beside other processes, on 90% of the cores"),
    ],
)
def test_shares_that_are_no_figures(share: float, noisy: bool, others: float | None, problem: str | None) -> None:
    peak = Peak.of([10.0], others=0.9 if noisy else 0.0, load_average=0.0)
    said = share_problem(share, peak, others)
    assert said == problem if problem is None else str(said).startswith(problem)
    assert share_problem(0.5, None, None) is None
    assert share_problem(1.01, None, None) is not None
