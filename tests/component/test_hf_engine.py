"""The contract of rollout engines, over every engine: tokens, log-probs, stop reasons, seeds, weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.platform.batch import Prompt, StopReason
from tandem.platform.checksum import checksum
from tandem.platform.config import ModelConfig, RolloutConfig
from tandem.platform.logprobs import token_logprobs
from tandem.platform.protocols import Sampling
from tandem.workers.hf_engine import HFEngine, cut_logits, sample
from tandem.workers.models import load_policy, model_inputs
from tandem.workers.rollout import ENGINES, RolloutSpec, RolloutWorker
from tandem.workers.runtime import Rank

CPU = torch.device("cpu")
PROMPTS = [
    Prompt(ids=(3, 4, 5), group_id=0, text=""),
    Prompt(ids=(6, 7, 8, 9, 10, 11), group_id=1, text=""),
    Prompt(ids=(5,), group_id=2, text=""),
]
SAMPLING = Sampling(samples=4, temperature=1.0, max_tokens=12, seed=(7, 0, 1))


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest, tiny_path: str) -> HFEngine:
    made: HFEngine = ENGINES[request.param](tiny_path, ModelConfig(), RolloutConfig(), CPU)
    return made


def trainer_logprobs(path: str, prompt: Prompt, response: list[int], temperature: float) -> list[float]:
    """Log-probs of a response by a plain forward pass over the unpadded sequence."""
    model = load_policy(path, ModelConfig()).eval()
    tokens = torch.tensor([[*prompt.ids, *response]])
    with torch.no_grad():
        logits = model(**model_inputs(tokens, torch.tensor([tokens.shape[1]]))).logits
    return token_logprobs(logits, tokens, temperature)[0, len(prompt.ids) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_trainers(engine: HFEngine, tiny_path: str, temperature: float) -> None:
    sampled = engine.generate(PROMPTS, replace(SAMPLING, temperature=temperature))
    for number, one in enumerate(sampled):
        expected = trainer_logprobs(tiny_path, PROMPTS[number // 4], one.ids, temperature)
        assert one.logprobs == pytest.approx(expected, abs=1e-4)


def test_raw_logprobs_would_be_noticed(engine: HFEngine, tiny_path: str) -> None:
    """At T = 0.7 log-probs at T = 1 differ by far more than the tolerance above."""
    one = engine.generate(PROMPTS[:1], replace(SAMPLING, temperature=0.3))[0]
    raw = trainer_logprobs(tiny_path, PROMPTS[0], one.ids, 1.0)
    assert max(abs(a - b) for a, b in zip(one.logprobs, raw, strict=True)) > 0.05


def test_order_and_count(engine: HFEngine) -> None:
    alone = [engine.generate([prompt], SAMPLING) for prompt in PROMPTS]
    together = engine.generate(PROMPTS, SAMPLING)
    assert [one.ids for one in together] == [one.ids for part in alone for one in part]


def test_a_sample_does_not_depend_on_its_neighbours(engine: HFEngine) -> None:
    engine.max_rows = 3  # waves that cut through groups
    in_waves = engine.generate(PROMPTS, SAMPLING)
    engine.max_rows = 256
    at_once = engine.generate(list(reversed(PROMPTS)), SAMPLING)
    expected = [one.ids for part in (at_once[8:], at_once[4:8], at_once[:4]) for one in part]
    assert [one.ids for one in in_waves] == expected


def test_seeds(engine: HFEngine) -> None:
    first, again = engine.generate(PROMPTS, SAMPLING), engine.generate(PROMPTS, SAMPLING)
    other = engine.generate(PROMPTS, replace(SAMPLING, seed=(7, 0, 2)))
    assert [one.ids for one in first] == [one.ids for one in again]
    assert [one.ids for one in first] != [one.ids for one in other]
    assert len({tuple(one.ids) for one in first[:4]}) > 1  # the samples of a prompt differ


def test_equal_prompts_of_two_groups_are_sampled_apart(engine: HFEngine) -> None:
    twins = [PROMPTS[0], replace(PROMPTS[0], group_id=99)]
    sampled = engine.generate(twins, SAMPLING)
    assert [one.ids for one in sampled[:4]] != [one.ids for one in sampled[4:]]


def test_stop_reasons(engine: HFEngine) -> None:
    engine.stop_ids = {3, 4}
    sampled = engine.generate(PROMPTS, replace(SAMPLING, samples=16))
    assert {one.stop for one in sampled} == {StopReason.STOP, StopReason.LENGTH}
    assert {one.ids[-1] for one in sampled if one.stop is StopReason.STOP} == {3, 4}
    for one in sampled:
        assert not {3, 4} & set(one.ids[:-1])
        assert (one.ids[-1] in {3, 4}) == (one.stop is StopReason.STOP)
        assert len(one.ids) <= 12
        assert one.stop is StopReason.STOP or len(one.ids) == 12


def test_a_stop_token_at_the_length_limit_is_a_stop(engine: HFEngine) -> None:
    engine.stop_ids = set(range(1000))
    for one in engine.generate(PROMPTS, replace(SAMPLING, max_tokens=1)):
        assert (one.stop, len(one.ids)) == (StopReason.STOP, 1)


def test_no_tokens_allowed_gives_empty_responses(engine: HFEngine) -> None:
    for one in engine.generate(PROMPTS, replace(SAMPLING, max_tokens=0)):
        assert (one.ids, one.stop) == ([], StopReason.LENGTH)


def test_greedy_takes_the_most_likely(engine: HFEngine, tiny_path: str) -> None:
    [one] = engine.generate(PROMPTS[:1], Sampling(1, 0.0, 5, (0,)))
    model = load_policy(tiny_path, ModelConfig()).eval()
    ids = list(PROMPTS[0].ids)
    for token in one.ids:
        with torch.no_grad():
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_loaded_weights_are_the_ones_sampled_from(engine: HFEngine, tiny_path: str) -> None:
    """After a sync, a replica equals an engine started with the new weights; tied embeddings stay tied."""
    source = load_policy(tiny_path, ModelConfig())
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    before = engine.generate(PROMPTS, SAMPLING)
    sent = {name: parameter.detach() for name, parameter in source.named_parameters()}
    assert engine.load_weights(sent) == {name: checksum(tensor) for name, tensor in sent.items()}
    after = engine.generate(PROMPTS, SAMPLING)
    assert [one.ids for one in before] != [one.ids for one in after]
    with torch.no_grad():
        tokens = torch.tensor([[*PROMPTS[0].ids, *after[0].ids]])
        expected = token_logprobs(source(tokens).logits, tokens, 1.0)[0, 3:].tolist()
    assert after[0].logprobs == pytest.approx(expected, abs=1e-4)


def test_left_padding_with_learned_positions(tmp_path: Path) -> None:
    """Absolute position embeddings count real tokens only, so a short prompt beside a long one is not shifted."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from tandem.workers.tiny import character_tokenizer

    tokenizer = character_tokenizer("0123456789+=")
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), ModelConfig(), RolloutConfig(), CPU)
    for number, one in enumerate(engine.generate(PROMPTS, SAMPLING)):
        expected = trainer_logprobs(str(tmp_path), PROMPTS[number // 4], one.ids, 1.0)
        assert one.logprobs == pytest.approx(expected, abs=1e-4)


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
        (0.75, 3, {1: 4 / 7, 3: 3 / 7}),  # .4 and .3 are .78 of the three that top_k leaves
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
    """At T = 1/2 the probabilities are 1, 16, 4 and 9 of 30: two tokens reach .8, at T = 1 it takes three."""
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


def test_the_engine_samples_from_the_cut_distribution(engine: HFEngine, tiny_path: str) -> None:
    model = load_policy(tiny_path, ModelConfig()).eval()
    for one in engine.generate(PROMPTS[:1], replace(SAMPLING, temperature=0.8, top_p=0.9, top_k=4)):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[0].ids, *one.ids]])).logits[0, 2:-1]
        cut = cut_logits(logits / 0.8, 0.9, 4).log_softmax(dim=-1)
        assert one.logprobs == pytest.approx(cut[torch.arange(len(one.ids)), one.ids].tolist(), abs=1e-4)


def test_the_most_likely_token_alone_is_greedy_and_certain(engine: HFEngine) -> None:
    greedy = engine.generate(PROMPTS, replace(SAMPLING, temperature=0.0))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        sampled = engine.generate(PROMPTS, replace(SAMPLING, **cut))  # type: ignore[arg-type]
        assert [one.ids for one in sampled] == [one.ids for one in greedy]
        assert {logprob for one in sampled for logprob in one.logprobs} == {0.0}
    assert engine.generate(PROMPTS, replace(SAMPLING, temperature=0.0, top_p=0.5, top_k=2)) == greedy


def test_worker_marks_versions_and_decodes(tiny_path: str) -> None:
    worker = RolloutWorker(RolloutSpec(tiny_path, ModelConfig(), RolloutConfig()), Rank())
    worker.start()
    worker.finish_weights(5)
    rollouts = worker.generate(PROMPTS, SAMPLING)
    assert {one.policy_version for one in rollouts} == {5}
    assert [one.prompt.group_id for one in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    tokenizer = worker.engine.tokenizer
    for one in rollouts:
        assert tokenizer.decode(one.response_ids, skip_special_tokens=True) == one.response_text
        assert "<end>" not in one.response_text
