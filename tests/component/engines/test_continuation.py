"""Appending the text of a response to the text of its prompt gives the text of both."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from small_tokenizers import bert_like, byte_level, sentencepiece_like

from tandem.workers.engines import continuation
from tandem.workers.engines.continuation import Continuation
from tandem.workers.roles.rollout import token_ends

KINDS: dict[str, Callable[[], Any]] = {"sentencepiece": sentencepiece_like, "bytes": byte_level, "bert": bert_like}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def after(tokenizer: Any, prompt: list[int], skip: bool = True) -> Continuation:
    return Continuation(partial(tokenizer.decode, skip_special_tokens=skip), prompt)


@pytest.mark.parametrize("skip", [True, False])
def test_the_space_before_the_first_word_is_kept(skip: bool) -> None:
    tokenizer = sentencepiece_like()
    prompt, bad = tokenizer("Answer:")["input_ids"], tokenizer.convert_tokens_to_ids(["▁bad", "▁answer"])
    assert tokenizer.decode(bad) == "bad answer"
    assert after(tokenizer, prompt, skip)(bad) == " bad answer"
    assert after(tokenizer, prompt, skip)(tokenizer.convert_tokens_to_ids(["bad"])) == "bad"
    assert after(tokenizer, prompt, skip)([]) == ""
    assert after(bert_like(), ids_of(bert_like(), "the answer"))(ids_of(bert_like(), "bad")) == " bad"


def test_special_tokens_at_the_end_of_a_prompt_do_not_hide_its_text() -> None:
    """Even if all tokens that are looked at are special, the response is not decoded as the beginning of a text."""
    tokenizer = sentencepiece_like()
    end, bad = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(["▁bad"])
    assert after(tokenizer, [*ids_of(tokenizer, "Answer:" * 30), *[end] * 30])(bad) == " bad"
    assert after(tokenizer, [*ids_of(tokenizer, "Answer:" * 30), *[end] * 30], skip=False)([*bad, end]) == " bad</s>"
    assert after(tokenizer, [tokenizer.bos_token_id])(bad) == "bad"  # without text before it, it is the beginning


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_a_character_that_began_in_the_prompt_is_the_responses(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for length in (0, 40):  # a prompt that is decoded whole, and one whose end is
        ids = ids_of(tokenizer, "the answer " * length + "the€good")
        cut = len(ids) - (5 if kind == "bytes" else 2)
        first, rest = ids[:cut], ids[cut:]
        assert after(tokenizer, first)(rest) == "€good"
        assert after(tokenizer, first)(ids_of(tokenizer, "good")).strip() == "good"
        assert token_ends(after(tokenizer, first), rest, "€good")[-1] == 5
        assert after(tokenizer, first[:-1])(first[-1:]) in ("", "�")  # not complete yet


def test_an_incomplete_character_does_not_repeat_the_prompt() -> None:
    """An incomplete character makes the decoder replace all byte tokens before it, including those of the prompt."""
    tokenizer = sentencepiece_like()
    prompt, broken = ids_of(tokenizer, "the日本"), ids_of(tokenizer, "日")[-3:-2]
    assert tokenizer.decode(prompt + broken) == "the" + "�" * 7
    assert after(tokenizer, prompt)(broken) == "�"


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_prompt_is_as_good_as_all_of_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, draw = KINDS[kind](), random.Random(7)
    texts = ["the answer is bad", "日本", " é!", "Hello world. ", "</s>", "<|end|>", "\n\n", "do  not", "🙂"]
    for _ in range(200):
        prompt, response = (ids_of(tokenizer, "is" + "".join(draw.choices(texts, k=draw.randint(1, 12)))) for _ in range(2))
        prompt, response = prompt[: draw.randint(1, len(prompt))], response[draw.randint(0, 2) :]
        for skip in (True, False):
            decode = partial(tokenizer.decode, skip_special_tokens=skip)
            short = Continuation(decode, prompt)
            monkeypatch.setattr(continuation, "CONTEXT", 10_000)
            whole = Continuation(decode, prompt)
            monkeypatch.undo()
            assert short(response) == whole(response), (prompt, response)
            both, before = decode(prompt + response), decode(prompt)
            assert not both.startswith(before) or before + short(response) == both
            assert len(token_ends(short, response, short(response))) == len(response)
