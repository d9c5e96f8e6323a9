"""Step rewards: where the tokens of a response end in its text, and which token gets the reward of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_cases import rollout
from small_tokenizers import sentencepiece_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tandem.platform.algorithms.advantages import process_relative
from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, StopReason
from tandem.platform.loop.protocols import Sampling
from tandem.platform.rewards.functions import RewardError
from tandem.workers.cluster.runtime import Rank
from tandem.workers.engines.completion import Sampled
from tandem.workers.roles.reward import RewardWorker
from tandem.workers.roles.rollout import RolloutSpec, RolloutWorker, token_ends

STEPS = """
def words(sample):
    if sample.response == "backwards":
        return [(4, 1.0), (2, 1.0)]
    ends = [place for place, character in enumerate(sample.response + " ") if character == " "]
    return [(end, 1.0 / number) for number, end in enumerate(ends, start=1)] if ends != [0] else 0.0

def length(sample):
    return len(sample.response)
"""
SAMPLING = Sampling(samples=8, temperature=1.0, max_tokens=10, seed=(3, 0, 1))


@pytest.fixture
def words(tmp_path: Path) -> str:
    file = tmp_path / "steps.py"
    file.write_text(STEPS)
    return f"{file}:words"


@pytest.fixture(scope="module")
def bpe() -> Any:
    """A byte-level tokenizer that has whole words, pieces and single bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["the answer is seven", "the answers are many"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def bpe_path(bpe: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bpe")
    config = GPT2Config(vocab_size=len(bpe), n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=bpe.eos_token_id)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(path)
    bpe.save_pretrained(path)
    return str(path)


def rollout_worker(path: str, *, steps: bool = True, **settings: Any) -> RolloutWorker:
    worker = RolloutWorker(RolloutSpec(path, ModelConfig(), RolloutConfig(**settings), token_ends=steps), Rank())
    worker.start()
    return worker


def prompts(*texts: str, tokenizer: Any) -> list[Prompt]:
    return [Prompt(tuple(tokenizer(text)["input_ids"]), number, text, "75") for number, text in enumerate(texts)]


# Where tokens end


def test_tokens_of_several_characters_end_where_their_text_does(bpe: Any) -> None:
    ids = bpe("the answer is 12")["input_ids"]
    pieces = [bpe.decode([token]) for token in ids]
    assert pieces == ["the", " answer", " is", " ", "1", "2"]
    assert token_ends(bpe.decode, ids, "the answer is 12") == [3, 10, 13, 14, 15, 16]


def test_a_character_of_several_tokens_counts_from_its_first(bpe: Any) -> None:
    ids = bpe("a€b")["input_ids"]
    assert [bpe.convert_ids_to_tokens(token) for token in ids] == ["a", "â", "Ĥ", "¬", "b"]
    assert token_ends(bpe.decode, ids, "a€b") == [1, 2, 2, 2, 3]


def test_ends_never_fall_nor_pass_the_text() -> None:
    """Some tokenizers join an apostrophe with the word before it, so a text can get shorter when a token is added."""
    texts = {1: "do", 2: "do n '", 3: "don't", 4: "don't."}
    assert token_ends(lambda ids: texts[len(ids)], [7, 7, 7, 7], "don't.") == [2, 6, 6, 6]
    assert token_ends(lambda ids: "", [], "") == []


@pytest.mark.parametrize("keep", [False, True])
def test_rollouts_say_where_their_tokens_end(bpe: Any, bpe_path: str, keep: bool) -> None:
    stop_ids = bpe("seven many")["input_ids"]
    worker = rollout_worker(bpe_path, stop_token_ids=stop_ids, keep_special_tokens=keep)
    rollouts = worker.generate(prompts("the", "answers are", tokenizer=bpe), replace(SAMPLING, samples=32))
    assert {one.stop for one in rollouts} == set(StopReason)
    for one in rollouts:
        stopped = one.stop is StopReason.STOP
        written = one.response_ids[:-1] if stopped and not keep else one.response_ids
        lengths = [len(bpe.decode(written[: n + 1], skip_special_tokens=not keep)) for n in range(len(written))]
        assert one.token_ends[: len(written)] == tuple(max(lengths[: n + 1]) for n in range(len(written)))
        assert len(one.token_ends) == len(one.response_ids)
        assert one.token_ends[-1] == len(one.response_text)
    stops = [one for one in rollouts if one.stop is StopReason.STOP and len(one.response_ids) > 1]
    added = {one.token_ends[-1] - one.token_ends[-2] for one in stops}
    assert added == {0} if not keep else min(added) > 0  # the stop token is only then part of the text


def test_a_response_that_is_a_stop_token_alone_has_no_characters(tiny_path: str) -> None:
    worker = rollout_worker(tiny_path)
    prompt = Prompt((3, 4), 0, "")
    assert worker._rollout(prompt, Sampled([1], [-0.5], StopReason.STOP), 0).token_ends == (0,)
    assert worker._rollout(prompt, Sampled([1, 5], [-0.5, -0.5]), 0).token_ends == (0, 1)
    assert worker._rollout(prompt, Sampled(), 0).token_ends == ()


@pytest.fixture(scope="module")
def spaced_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that always says " bad"; each word token of its tokenizer begins with a space."""
    path, tokenizer = tmp_path_factory.mktemp("spaced"), sentencepiece_like()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=2)
    model = GPT2LMHeadModel(config)
    bad = tokenizer.convert_tokens_to_ids("▁bad")
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(1000 * model.lm_head.weight[bad])
        model.lm_head.weight[bad] *= 10
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("keep", [False, True])
def test_text_and_ends_go_on_from_the_prompt(spaced_path: str, keep: bool) -> None:
    """If the response were decoded alone, its first word would lose its space, and prompt + response be `Answer:bad`."""
    worker = rollout_worker(spaced_path, keep_special_tokens=keep)
    tokenizer = worker.engine.tokenizer
    many = "the answer is good. " * 9
    for one in worker.generate(prompts("Answer:", many, tokenizer=tokenizer), replace(SAMPLING, max_tokens=3)):
        assert one.response_text == " bad bad bad"
        assert one.token_ends == (4, 8, 12)
        before = tokenizer.decode(one.prompt.ids, skip_special_tokens=True)
        whole = tokenizer.decode([*one.prompt.ids, *one.response_ids], skip_special_tokens=True)
        assert before + one.response_text == whole


def test_stop_strings_are_looked_for_in_the_same_text(spaced_path: str) -> None:
    worker = rollout_worker(spaced_path, stop=[" bad"])
    asked = prompts("Answer:", tokenizer=worker.engine.tokenizer)
    [one] = worker.generate(asked, replace(SAMPLING, samples=1))
    assert (one.response_text, len(one.response_ids), one.stop) == (" bad", 1, StopReason.STOP)


def test_no_ends_are_counted_where_no_estimator_reads_them(tiny_path: str) -> None:
    worker = rollout_worker(tiny_path, steps=False)
    assert {one.token_ends for one in worker.generate([Prompt((3, 4), 0, "")], SAMPLING)} == {()}


# Which token a reward goes to


def spoken(text: str, *ends: int) -> Rollout:
    """A response whose tokens end at these positions in the text."""
    ids, many = tuple(range(3, 3 + len(ends))), len(ends)
    own = rollout(text)
    return replace(own, response_ids=ids, response_mask=(True,) * many, logprobs=(-0.5,) * many, token_ends=ends)


def test_steps_end_in_the_token_that_holds_their_last_character(make: Callable[..., RewardWorker], words: str) -> None:
    worker = make(function=words, function_weight=3.0)
    # "one two three": words end at 3, 7 and 13 and are worth 1, 1/2 and 1/3
    scores = worker.score(
        [
            spoken("one two three", 2, 3, 7, 13, 13),
            spoken("one two three", 1, 5, 13),
            spoken("one two three", 13),
            spoken("", 0),
            spoken("one two three"),
        ]
    )
    worth = 1 + 1 / 2 + 1 / 3
    assert [score.reward for score in scores] == pytest.approx([3 * worth, 3 * worth, 3 * worth, 0.0, 3 * worth])
    assert scores[0].parts == {"words": pytest.approx(worth)}
    assert scores[0].steps == pytest.approx({1: 3.0, 2: 1.5, 3: 1.0})
    assert scores[1].steps == pytest.approx({1: 3.0, 2: 2.5})
    assert scores[2].steps == pytest.approx({0: 5.5})
    assert [score.steps for score in scores[3:]] == [{}, {}]


def test_parts_with_and_without_steps_add_up(make: Callable[..., RewardWorker], words: str) -> None:
    both = {"matching_characters": 4.0, "exact_match": 0.5}
    [score] = make(functions=both, function=words).score([spoken("7 8", 1, 3)])  # the answer is 7
    assert score.parts == {"matching_characters": 1.0, "exact_match": 0.0, "words": 1.5}
    assert score.reward == 4.0 + 1.5
    assert score.steps == {0: 4.0 + 1.0, 1: 0.5}
    [score] = make(functions=both, function=words.replace(":words", ":length")).score([spoken("7 8", 1, 3)])
    assert (score.reward, score.steps) == (4.0 + 3.0, {0: 4.0, 1: 0.0})


def test_a_part_of_weight_zero_cuts_no_steps(make: Callable[..., RewardWorker], words: str) -> None:
    worker = make(functions={"exact_match": 1.0}, function=words, function_weight=0.0)
    [score] = worker.score([spoken("7 8", 1, 3)])
    assert score == Score(reward=0.0, parts={"exact_match": 0.0, "words": 1.5})


def test_invalid_steps_stop_with_the_sample(make: Callable[..., RewardWorker], words: str) -> None:
    message = r"'words' returned list .* step 2 ends at 2, but must end after 4 .*; sample 1 of group 5"
    with pytest.raises(RewardError, match=message):
        make(function=words, allow_errors=True).score([spoken("one", 3), spoken("backwards", 9)])


def test_from_sampling_to_the_credit_of_each_token(make: Callable[..., RewardWorker], tiny_path: str) -> None:
    """In the embedded task, each character is one token, and the end token earns no reward."""
    worker = rollout_worker(tiny_path)
    asked = prompts("37+38=", "12+63=", tokenizer=worker.engine.tokenizer)
    rollouts = worker.generate(asked, SAMPLING)
    scores = make(functions={"matching_characters": 1.0}).score(rollouts)
    batch = RolloutBatch.from_rollouts(rollouts, scores)
    assert batch.rewards.max() > 0
    plain = [one for one in rollouts if one.token_ends == tuple(range(1, SAMPLING.max_tokens + 1))]
    assert plain  # responses in which every token is a character
    for row, one in enumerate(rollouts):
        start = len(one.prompt.ids)
        expected = [0.5 * (one.response_text[n : n + 1] == "75"[n]) for n in range(2)]
        got = batch.token_rewards[row, start : start + len(one.response_ids)]
        assert float(got.sum()) == sum(expected)
        if one in plain:
            assert got.tolist() == [*expected, *[0.0] * 8]
            assert batch.step_ends[row, start : start + 10].all()
    credit = process_relative(
        batch.token_rewards, batch.step_ends, batch.response_mask, batch.group_ids, batch.scored, group_std="population"
    )
    varied = [row for row in range(len(batch)) if len(set(credit[row][batch.response_mask[row]].tolist())) > 1]
    assert varied  # the tokens of one response differ, which is impossible with an outcome reward
