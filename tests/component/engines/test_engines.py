"""The contract of rollout engines, over every engine: tokens, log-probs, stops, seeds, weights, threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CPU, PROMPTS, SAMPLING, changed, save_model, trainer_logprobs

from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt, StopReason
from tandem.platform.loop.checksum import checksum
from tandem.platform.loop.protocols import Sampling
from tandem.workers.cluster.runtime import Rank
from tandem.workers.engines.hf import HFEngine, cut_logits
from tandem.workers.models.loading import load_policy
from tandem.workers.roles.rollout import ENGINES, RolloutBackend, RolloutSpec, RolloutWorker

SLOW = {"vllm"}
GREEDY = Sampling(1, 0.0, 12, (0,))
ROLLOUT = RolloutConfig(max_model_tokens=256, kv_cache_gb=0.0625)
PARAMETERS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in sorted(ENGINES)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(path: str) -> Any:
    return load_policy(path, ModelConfig()).eval()


@pytest.fixture(scope="module", params=PARAMETERS)
def engine(request: pytest.FixtureRequest, path: str) -> RolloutBackend:
    """One engine for all tests, which must not change its weights and settings."""
    made: RolloutBackend = ENGINES[request.param](path, ModelConfig(), ROLLOUT, CPU)
    return made


@pytest.fixture
def restored(engine: RolloutBackend, policy: Any) -> Iterator[None]:
    """Restores the engine's initial weights after the test."""
    yield
    send(engine, policy)


def send(engine: RolloutBackend, model: Any, buckets: int = 3) -> dict[str, int]:
    """Sends all weights in several buckets; returns the engine's checksums."""
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    arrived: dict[str, int] = {}
    for number in range(buckets):
        arrived |= engine.load_weights(dict(named[number::buckets]))
    engine.finish_weights()
    return arrived


def answers_of_a_fresh_engine(kind: Any, path: str, prompts: Sequence[Prompt], how: Sequence[Sampling]) -> list[Any]:
    engine: RolloutBackend = kind(path, ModelConfig(), ROLLOUT, CPU)
    return [engine.generate(prompts, sampling) for sampling in how]


def largest_gap(sampled: Any, logprobs: Any) -> float:
    pairs = zip(sampled, logprobs, strict=True)
    return max(abs(a - b) for one, expected in pairs for a, b in zip(one.logprobs, expected, strict=True))


def ids_of(sampled: Any) -> list[list[int]]:
    return [one.ids for one in sampled]


# Tokens and log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers(engine: RolloutBackend, policy: Any, temperature: float) -> None:
    sampled = engine.generate(PROMPTS, replace(SAMPLING, temperature=temperature))
    expected = trainer_logprobs(policy, PROMPTS, sampled, temperature)
    for one, logprobs in zip(sampled, expected, strict=True):
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_logprobs_before_the_temperature_would_be_noticed(engine: RolloutBackend, policy: Any) -> None:
    """At T = 0.7, log-probs without the temperature differ by a thousand times the tolerance above."""
    sampled = engine.generate(PROMPTS, replace(SAMPLING, temperature=0.7))
    raw = trainer_logprobs(policy, PROMPTS, sampled, 1.0)
    assert largest_gap(sampled, raw) > 0.1


def test_tokens_go_in_and_out_as_they_are(engine: RolloutBackend, policy: Any) -> None:
    """Prompt and responses keep their tokens, even where encoding their text would give other tokens."""
    tokenizer = engine.tokenizer
    pair = next(number for number in range(3, len(tokenizer)) if len(tokenizer.decode([number])) == 2)
    pieces = tuple(tokenizer.convert_tokens_to_ids(list(tokenizer.decode([pair]))))
    assert tokenizer(tokenizer.decode(pieces))["input_ids"] == [pair]
    split, joined = Prompt(pieces * 3, 0, ""), Prompt((pair,) * 3, 0, "")
    sampled = engine.generate([split], replace(SAMPLING, samples=8))
    assert [one.logprobs for one in sampled] == [
        pytest.approx(logprobs, abs=1e-4) for logprobs in trainer_logprobs(policy, [split], sampled, 1.0)
    ]
    other = trainer_logprobs(policy, [joined], sampled, 1.0)
    assert largest_gap(sampled, other) > 0.1
    again = [tokenizer(tokenizer.decode(one.ids), add_special_tokens=False)["input_ids"] for one in sampled]
    assert again != ids_of(sampled)


def test_samples_stand_side_by_side_in_order_of_the_prompts(engine: RolloutBackend) -> None:
    alone = [ids_of(engine.generate([prompt], SAMPLING)) for prompt in PROMPTS]
    assert [len(part) for part in alone] == [4, 4, 4]
    assert ids_of(engine.generate(PROMPTS, SAMPLING)) == [ids for part in alone for ids in part]
    backwards = ids_of(engine.generate(PROMPTS[::-1], SAMPLING))
    assert [*backwards[8:], *backwards[4:8], *backwards[:4]] == [ids for part in alone for ids in part]
    assert engine.generate([], SAMPLING) == []


def test_greedy_takes_the_most_likely(engine: RolloutBackend, policy: Any) -> None:
    sampled = engine.generate(PROMPTS, replace(GREEDY, samples=2))
    assert len(sampled) == 6
    assert sampled[::2] == sampled[1::2]
    expected = trainer_logprobs(policy, PROMPTS, sampled, 1.0)  # at temperature 1, regardless of the greedy limit
    for row, (one, logprobs) in enumerate(zip(sampled, expected, strict=True)):
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
        start = len(PROMPTS[row // 2].ids)
        with torch.no_grad():
            logits = policy(torch.tensor([[*PROMPTS[row // 2].ids, *one.ids]])).logits[0, start - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == one.ids


def test_greedy_and_sampled_calls_at_once_keep_their_temperatures(engine: RolloutBackend, policy: Any) -> None:
    cold = replace(SAMPLING, temperature=0.5)
    with ThreadPoolExecutor(2) as threads:
        greedy = threads.submit(engine.generate, PROMPTS, replace(GREEDY, max_tokens=40))
        sampled = threads.submit(engine.generate, PROMPTS, replace(cold, max_tokens=40)).result()
    for results, temperature in ((greedy.result(), 1.0), (sampled, 0.5)):
        for one, logprobs in zip(results, trainer_logprobs(policy, PROMPTS, results, temperature), strict=True):
            assert one.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_the_cut_distribution_is_sampled_from(engine: RolloutBackend, policy: Any) -> None:
    for one in engine.generate(PROMPTS[:1], replace(SAMPLING, temperature=0.8, top_p=0.9, top_k=4)):
        with torch.no_grad():
            logits = policy(torch.tensor([[*PROMPTS[0].ids, *one.ids]])).logits[0, 2:-1]
        cut = cut_logits(logits / 0.8, 0.9, 4).log_softmax(dim=-1)
        assert one.logprobs == pytest.approx(cut[torch.arange(len(one.ids)), one.ids].tolist(), abs=1e-4)


def test_the_most_likely_token_alone_is_greedy_and_certain(engine: RolloutBackend) -> None:
    greedy = engine.generate(PROMPTS, replace(SAMPLING, temperature=0.0))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        sampled = engine.generate(PROMPTS, replace(SAMPLING, **cut))  # type: ignore[arg-type]
        assert ids_of(sampled) == ids_of(greedy)
        assert {logprob for one in sampled for logprob in one.logprobs} == {0.0}
    assert engine.generate(PROMPTS, replace(SAMPLING, temperature=0.0, top_p=0.5, top_k=2)) == greedy


# Where a response ends


def test_every_stop_token_ends_a_response(engine: RolloutBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {5, 9, 11}
    monkeypatch.setattr(engine, "stop_ids", ends)
    sampled = engine.generate(PROMPTS, replace(SAMPLING, samples=32))
    assert {one.stop for one in sampled} == {StopReason.STOP, StopReason.LENGTH}
    assert {one.ids[-1] for one in sampled if one.stop is StopReason.STOP} == ends
    for one in sampled:
        assert not ends & set(one.ids[:-1])
        assert (one.ids[-1] in ends) == (one.stop is StopReason.STOP)
        assert len(one.ids) == len(one.logprobs) <= 12
        assert one.stop is StopReason.STOP or len(one.ids) == 12


def test_the_models_own_end_token_ends_a_response(engine: RolloutBackend) -> None:
    end = engine.tokenizer.eos_token_id
    assert engine.stop_ids == {end}
    sampled = engine.generate(PROMPTS, replace(SAMPLING, samples=64, max_tokens=40))
    assert StopReason.STOP in {one.stop for one in sampled}
    assert all((one.ids[-1] == end) == (one.stop is StopReason.STOP) for one in sampled)


def test_a_stop_token_at_the_length_limit_is_a_stop(engine: RolloutBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "stop_ids", set(range(len(engine.tokenizer))))
    for one in engine.generate(PROMPTS, replace(SAMPLING, max_tokens=1)):
        assert (one.stop, len(one.ids)) == (StopReason.STOP, 1)


def test_a_stop_string_ends_a_response(engine: RolloutBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response ends with the first token that completes the stop string, however the string is tokenized."""
    monkeypatch.setattr(engine, "stop_ids", set())
    free = engine.generate(PROMPTS, replace(SAMPLING, samples=32))
    monkeypatch.setattr(engine, "stop", ("12", "7"))
    sampled = engine.generate(PROMPTS, replace(SAMPLING, samples=32))
    assert {one.stop for one in sampled} == set(StopReason)
    tokens = set()
    for one, whole in zip(sampled, free, strict=True):
        texts = [engine.tokenizer.decode(whole.ids[:count]) for count in range(1, 13)]
        length = next((n for n, text in enumerate(texts, 1) if "12" in text or "7" in text), 12)
        assert one.ids == whole.ids[:length]
        assert one.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-4)
        assert (one.stop is StopReason.STOP) == ("12" in texts[length - 1] or "7" in texts[length - 1])
        tokens |= {one.ids[-1]} if one.stop is StopReason.STOP else set()
    assert len(tokens) > 3  # "7", "12", "2" after a "1", and pairs that hold one of them


def test_no_tokens_allowed_gives_empty_responses(engine: RolloutBackend) -> None:
    sampled = engine.generate(PROMPTS, replace(SAMPLING, max_tokens=0))
    assert len(sampled) == 12
    for one in sampled:
        assert (one.ids, one.logprobs, one.stop) == ([], [], StopReason.LENGTH)


# Seeds


def test_a_response_is_a_function_of_the_seed(engine: RolloutBackend) -> None:
    first, again = engine.generate(PROMPTS, SAMPLING), engine.generate(PROMPTS, SAMPLING)
    other = engine.generate(PROMPTS, replace(SAMPLING, seed=(7, 0, 2)))
    assert ids_of(first) == ids_of(again)
    assert ids_of(first) != ids_of(other)
    assert len({tuple(one.ids) for one in first[:4]}) == 4  # the samples of a prompt differ


def test_equal_prompts_of_two_groups_are_sampled_apart(engine: RolloutBackend) -> None:
    sampled = ids_of(engine.generate([PROMPTS[0], replace(PROMPTS[0], group_id=99)], SAMPLING))
    assert not any(ids in sampled[4:] for ids in sampled[:4])


def test_many_samples_follow_the_distribution(engine: RolloutBackend, policy: Any) -> None:
    """The first tokens of 2,000 samples match their probabilities, so consecutive seeds give independent samples."""
    sampled = [
        engine.generate([replace(PROMPTS[0], group_id=group)], replace(SAMPLING, samples=200, max_tokens=1))
        for group in range(10)
    ]
    found = torch.zeros(len(engine.tokenizer))
    for part in sampled:
        for one in part:
            found[one.ids[0]] += 1
    with torch.no_grad():
        expected = policy(torch.tensor([PROMPTS[0].ids])).logits[0, -1].softmax(dim=-1) * 2000
    common = expected > 5
    score = ((found - expected) ** 2 / expected)[common].sum()
    freedom = int(common.sum()) - 1
    assert score < freedom + 5 * (2 * freedom) ** 0.5


# Weights


@pytest.mark.usefixtures("restored")
def test_after_new_weights_an_engine_is_a_fresh_one(engine: RolloutBackend, path: str, tmp_path: Path) -> None:
    """Tied embeddings stay tied, and no response uses cached results of the old weights."""
    source = changed(path, seed=1)
    source.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    long = Prompt(tuple(range(3, 35)) * 5, 7, "")  # longer than a block of vLLM's prefix cache
    asked = [*PROMPTS, long]
    before = engine.generate(asked, GREEDY)
    send(engine, source)
    after, samples = engine.generate(asked, GREEDY), engine.generate(asked, SAMPLING)
    assert all(a.logprobs != b.logprobs for a, b in zip(before, after, strict=True))
    how = (GREEDY, SAMPLING)
    if isinstance(engine, HFEngine):
        fresh = answers_of_a_fresh_engine(type(engine), str(tmp_path), asked, how)
    else:  # in its own process: vLLM engines in one process share state that is lost when the first one ends
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            fresh = process.submit(answers_of_a_fresh_engine, type(engine), str(tmp_path), asked, how).result()
    for results, expected in zip((after, samples), fresh, strict=True):
        assert ids_of(results) == ids_of(expected)
        for one, other in zip(results, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    for one, logprobs in zip(samples, trainer_logprobs(source, asked, samples, 1.0), strict=True):
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.usefixtures("restored")
def test_every_tensor_is_answered_with_its_checksum(engine: RolloutBackend, path: str) -> None:
    source = changed(path, seed=2)
    assert send(engine, source) == {name: checksum(parameter) for name, parameter in source.named_parameters()}


@pytest.mark.usefixtures("restored")
def test_the_sender_may_write_to_its_tensors_at_once(engine: RolloutBackend, path: str) -> None:
    source = changed(path, seed=3)
    send(engine, source)
    expected = engine.generate(PROMPTS, GREEDY)
    for name, parameter in source.named_parameters():
        bucket = {name: parameter.detach().clone()}
        engine.load_weights(bucket)
        bucket[name].zero_()
    engine.finish_weights()
    assert engine.generate(PROMPTS, GREEDY) == expected


@pytest.mark.usefixtures("restored")
def test_weights_may_come_twenty_times(engine: RolloutBackend, path: str, policy: Any) -> None:
    before = engine.generate(PROMPTS, GREEDY)
    source = changed(path, seed=4)
    for _ in range(10):
        send(engine, source)
        assert ids_of(engine.generate(PROMPTS, GREEDY)) != ids_of(before)
        send(engine, policy)
    assert engine.generate(PROMPTS, GREEDY) == before


def test_sleep_and_staged_wake_keep_the_weights(engine: RolloutBackend, policy: Any) -> None:
    before = engine.generate(PROMPTS, SAMPLING)
    engine.sleep()
    engine.wake("weights")
    send(engine, policy)
    engine.wake("cache")
    assert engine.generate(PROMPTS, SAMPLING) == before


def test_bytes_are_those_of_the_model(engine: RolloutBackend, policy: Any) -> None:
    assert engine.weight_bytes() == sum(parameter.numel() for parameter in policy.parameters()) * 4


# Threads and the worker


def test_calls_of_two_threads_give_what_they_give_one_after_the_other(engine: RolloutBackend) -> None:
    calls = [
        (PROMPTS, replace(SAMPLING, max_tokens=40)),
        ([replace(prompt, group_id=prompt.group_id + 50) for prompt in PROMPTS], replace(SAMPLING, temperature=0.7)),
        (PROMPTS[1:], replace(SAMPLING, seed=(9,), samples=2)),
        (PROMPTS, GREEDY),
    ]
    alone = [engine.generate(*call) for call in calls]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda call: engine.generate(*call), calls))
    for one, other in zip(alone, together, strict=True):
        assert ids_of(one) == ids_of(other)
        assert [a.stop for a in one] == [b.stop for b in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_worker_marks_versions_and_decodes(engine: RolloutBackend, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RolloutWorker(RolloutSpec(path, ModelConfig(), ROLLOUT), Rank())
    worker.engine = engine
    assert worker.finish_weights(5) == {}
    end, decode = engine.tokenizer.eos_token_id, engine.tokenizer.decode
    rollouts = worker.generate(PROMPTS, replace(SAMPLING, samples=16, max_tokens=40))
    assert {one.policy_version for one in rollouts} == {5}
    assert [one.prompt.group_id for one in rollouts] == [0] * 16 + [1] * 16 + [2] * 16
    assert {one.response_ids[-1] == end for one in rollouts} == {True, False}
    for one in rollouts:
        assert decode(one.response_ids, skip_special_tokens=True) == one.response_text
    # A stop string belongs to the text, a stop token does not.
    monkeypatch.setattr(engine, "stop", ("7",))
    texts = [one.response_text for one in worker.generate(PROMPTS, SAMPLING) if one.stop is StopReason.STOP]
    assert any("7" in text for text in texts)
    assert worker.memory()["weights"] == engine.weight_bytes()
    worker.sleep()
    worker.wake("weights")
    worker.wake("cache")
