"""Behaviour specific to the hf engine: waves, left padding, and sampling of a token. test_engines.py has the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import CPU, PROMPTS, SAMPLING, trainer_logprobs

from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.workers.engines.hf import HFEngine, cut_logits, sample
from tandem.workers.models.loading import load_policy


def test_a_sample_does_not_depend_on_its_neighbours(tiny_path: str) -> None:
    engine = HFEngine(tiny_path, ModelConfig(), RolloutConfig(), CPU)
    engine.max_rows = 3  # waves that cut through groups
    in_waves = engine.generate(PROMPTS, SAMPLING)
    engine.max_rows = 256
    at_once = engine.generate(list(reversed(PROMPTS)), SAMPLING)
    expected = [one.ids for part in (at_once[8:], at_once[4:8], at_once[:4]) for one in part]
    assert [one.ids for one in in_waves] == expected


def test_left_padding_with_learned_positions(tmp_path: Path) -> None:
    """Absolute positions count only real tokens, so a short prompt in a batch with a long prompt is not shifted."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from tandem.workers.models.tiny import character_tokenizer

    tokenizer = character_tokenizer("0123456789+=")
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), ModelConfig(), RolloutConfig(), CPU)
    sampled = engine.generate(PROMPTS, SAMPLING)
    expected = trainer_logprobs(load_policy(str(tmp_path), ModelConfig()), PROMPTS, sampled, 1.0)
    for one, logprobs in zip(sampled, expected, strict=True):
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_sampling_follows_the_distribution() -> None:
    """Uniforms 0, 1/n, 2/n, ... cut [0, 1) in proportion to the probabilities."""
    logits = torch.tensor([0.5, 0.25, 0.25, 0.0]).log().repeat(1000, 1)
    tokens, logprobs = sample(logits, 1.0, torch.arange(1000, dtype=torch.float64) / 1000)
    assert torch.bincount(tokens, minlength=4).tolist() == pytest.approx([500, 250, 250, 0], abs=1)
    assert logprobs[0].item() == pytest.approx(-0.693147, abs=1e-5)
    almost_one = torch.tensor([1 - 1e-16], dtype=torch.float64)
    assert sample(logits[:1], 1.0, almost_one)[0].item() == 2  # never a token of probability 0


TENTHS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 2, {1: 4 / 7, 3: 3 / 7}),
        (1.0, 3, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        (1.0, 99, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        (0.01, None, {1: 1.0}),
        (0.45, None, {1: 4 / 7, 3: 3 / 7}),
        (0.75, None, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        (0.99, None, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        (0.75, 3, {1: 4 / 7, 3: 3 / 7}),  # .4 and .3 are .78 of the three tokens that top_k keeps
        (0.75, 1, {1: 1.0}),
    ],
)
def test_the_cut_distribution_is_sampled_from(top_p: float, top_k: int | None, kept: dict[int, float]) -> None:
    uniforms = torch.arange(6300, dtype=torch.float64) / 6300
    tokens, logprobs = sample(TENTHS.repeat(6300, 1), 1.0, uniforms, top_p=top_p, top_k=top_k)
    counts = torch.bincount(tokens, minlength=4)
    assert {n: count / 6300 for n, count in enumerate(counts.tolist()) if count} == pytest.approx(kept, abs=2e-4)
    found = dict(zip(tokens.tolist(), logprobs.exp().tolist(), strict=True))
    assert found == pytest.approx(kept, abs=1e-6)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)


def test_the_temperature_comes_before_the_cut() -> None:
    """At T = 1/2 the probabilities are 1, 16, 4 and 9 of 30, so two tokens reach .8; at T = 1 it takes three tokens."""
    cold, _ = sample(TENTHS.repeat(100, 1), 0.5, torch.arange(100, dtype=torch.float64) / 100, top_p=0.8)
    warm, _ = sample(TENTHS.repeat(100, 1), 1.0, torch.arange(100, dtype=torch.float64) / 100, top_p=0.8)
    assert (set(cold.tolist()), set(warm.tolist())) == ({1, 3}, {1, 2, 3})


def test_of_equally_likely_tokens_the_first_are_kept() -> None:
    level = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
    assert cut_logits(level, 1.0, 3).isfinite().tolist() == [[False, True, True, False, True, False]]
    assert cut_logits(level, 1.0, 5).isfinite().tolist() == [[True, True, True, False, True, True]]
    assert cut_logits(torch.zeros(1, 8), 0.5, None).isfinite().tolist() == [[True] * 4 + [False] * 4]
    assert torch.equal(cut_logits(level, 1.0, 3)[0, [1, 2, 4]], torch.ones(3))


def test_without_a_cut_every_bit_is_that_of_the_whole_distribution() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(64, 50, generator=draw), torch.rand(64, dtype=torch.float64, generator=draw)
    logprobs = (logits / 0.7).log_softmax(dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    expected = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(dim=-1)
    for settings in ({}, {"top_p": 1.0, "top_k": None}, {"top_k": 50}):
        tokens, found = sample(logits, 0.7, uniforms, **settings)  # type: ignore[arg-type]
        assert torch.equal(tokens, expected)
        assert torch.equal(found, logprobs[torch.arange(64), expected])
