"""Prompt tokens from real tokenizers: special tokens only at the front, chat templates applied once, overlong prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import small_config
from small_tokenizers import bert_like, byte_level, sentencepiece_like
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tandem.platform.data.prompts import EncodedRows, encode_rows
from tandem.platform.data.rows import DataError, Row
from tandem.platform.rewards.prefill import check_beginnings

CHARACTERS = "abcdefgh "
BOS, END = 0, 1
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ 'h' }}{% endif %}"
CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
BEGUN = CHAT[:2]


def build(adds_bos: bool, template: str | None = None, has_bos: bool = True) -> PreTrainedTokenizerFast:
    """Ids: <s> 0, </s> 1, a 2, b 3, c 4, ... h 9, space 10."""
    vocabulary = {token: number for number, token in enumerate(("<s>", "</s>", *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if has_bos else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def encode(prompt: object, tokenizer: PreTrainedTokenizerFast, limit: int = 64, overlong: str = "error") -> EncodedRows:
    return encode_rows([Row(prompt)], tokenizer, limit, overlong, "rows")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "adds_bos", "ids"),
    [
        ("ab", True, (0, 2, 3)),
        ("<s>ab", True, (0, 2, 3)),
        ("ab", False, (2, 3)),
        ("<s>ab", False, (0, 2, 3)),
    ],
)
def test_text_gets_exactly_the_bos_of_its_tokenizer(text: str, adds_bos: bool, ids: tuple[int, ...]) -> None:
    row = encode(text, build(adds_bos)).rows[0]
    assert row.ids == ids
    assert row.text == text


@pytest.mark.parametrize("adds_bos", [True, False])
def test_chat_gets_one_bos_whether_or_not_the_tokenizer_adds_one(adds_bos: bool) -> None:
    row = encode(CHAT, build(adds_bos, TEMPLATE + GENERATION)).rows[0]
    assert row.ids == (0, 2, 3, 1, 4, 1, 5, 1, 9)
    assert row.text == "<s>ab</s>c</s>d</s>h"


def test_template_that_emits_bos_twice_gives_one() -> None:
    assert encode(CHAT, build(True, "{{ bos_token }}" + TEMPLATE)).rows[0].ids == (0, 2, 3, 1, 4, 1, 5, 1)


def test_tokenizer_without_bos() -> None:
    tokenizer = build(adds_bos=False, template=TEMPLATE.removeprefix("{{ bos_token }}") + GENERATION, has_bos=False)
    assert encode("ab", tokenizer).rows[0].ids == (2, 3)
    assert encode(CHAT, tokenizer).rows[0].ids == (2, 3, 1, 4, 1, 5, 1, 9)
    assert encode("abcd", tokenizer, 2, "cut").rows[0].ids == (4, 5)


def test_chat_without_a_template_is_an_error() -> None:
    with pytest.raises(DataError, match=r"rows, row 1: .* no chat template; set model\.path"):
        encode(CHAT, build(adds_bos=True))


def test_prompt_of_exactly_the_limit_is_kept() -> None:
    result = encode("abc", build(adds_bos=True), limit=4)
    assert (result.rows[0].ids, result.cut, result.dropped) == ((0, 2, 3, 4), 0, 0)


def test_overlong_error_names_the_row_and_what_to_set() -> None:
    rows = [Row("a"), Row("abc", where="train.jsonl, line 7")]
    with pytest.raises(DataError) as error:
        encode_rows(rows, build(adds_bos=True), 3, "error", "rows")
    for part in ("train.jsonl, line 7", "4 tokens", "data.max_prompt_tokens=3", "data.overlong_prompt"):
        assert part in str(error.value)


@pytest.mark.parametrize(("adds_bos", "limit", "ids"), [(True, 3, (0, 4, 5)), (False, 3, (3, 4, 5)), (True, 1, (5,))])
def test_cut_keeps_the_end_behind_the_bos(adds_bos: bool, limit: int, ids: tuple[int, ...]) -> None:
    tokenizer = build(adds_bos)
    result = encode("abcd", tokenizer, limit, "cut")
    assert result.rows[0].ids == ids
    assert result.rows[0].text == tokenizer.decode(list(ids))
    assert (result.cut, result.dropped) == (1, 0)


def test_drop_counts_and_keeps_the_others_in_order() -> None:
    rows = [Row("a", 1), Row("abcd", 2), Row("b", 3), Row("abc", 4)]
    result = encode_rows(rows, build(adds_bos=False), 2, "drop", "rows")
    assert [item.row.answer for item in result.rows] == [1, 3]
    assert (result.cut, result.dropped) == (0, 2)


def test_dropping_everything_is_an_error() -> None:
    with pytest.raises(DataError, match=r"rows: all 1 prompts .*data\.max_prompt_tokens=2.* drops them all"):
        encode("abcd", build(adds_bos=False), 2, "drop")


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="rows: no rows"):
        encode_rows([], build(adds_bos=False), 2, "error", "rows")


def test_prompt_without_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match="rows, row 1: the prompt has no tokens"):
        encode("", build(adds_bos=False))


# Special tokens that a tokenizer adds


def tokens(prompt: object, tokenizer: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(encode(prompt, tokenizer).rows[0].ids))


@pytest.mark.parametrize("front", ["", "<s>"])
@pytest.mark.parametrize("behind", ["", "</s>", "</s> <unk>", "<s>"])
def test_what_a_tokenizer_adds_behind_a_text_is_no_part_of_the_prompt(front: str, behind: str) -> None:
    tokenizer = sentencepiece_like(front, behind)
    begin = [front] if front else []
    assert tokens("the answer", tokenizer) == [*begin, "▁the", "▁answer"]
    assert tokens("the</s>", tokenizer) == [*begin, "▁the", "</s>"]
    assert tokens("<s>the</s></s>", tokenizer) == ["<s>", "the", "</s>", "</s>"]
    assert tokens("</s>", tokenizer) == [*begin, "</s>"]


def test_one_token_that_begins_and_ends_texts() -> None:
    for front in ("", "<|end|>"):
        tokenizer = byte_level(front, "<|end|>")
        begin = [front] if front else []
        assert tokens("ab", tokenizer) == [*begin, "a", "b"]
        assert tokens("<|end|>ab", tokenizer) == ["<|end|>", "a", "b"]
        assert tokens("ab<|end|>", tokenizer) == [*begin, "a", "b", "<|end|>"]


def test_a_begin_token_under_another_name_is_kept_and_an_end_token_is_not() -> None:
    assert tokens("the answer", bert_like()) == ["[CLS]", "the", "answer"]
    assert tokens("[CLS] the answer [SEP]", bert_like()) == ["[CLS]", "the", "answer", "[SEP]"]
    row = encode("the answer is bad", bert_like(), limit=3, overlong="cut").rows[0]
    assert bert_like().convert_ids_to_tokens(list(row.ids)) == ["[CLS]", "is", "bad"]


def test_a_tokenizer_that_writes_the_text_otherwise_alone() -> None:
    """A space in front, say, that is only there behind a special token."""

    class Uneven(PreTrainedTokenizerFast):
        def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
            text = " " + text if add_special_tokens else text
            return super().__call__(text, add_special_tokens=add_special_tokens, **options)

    core = build(True)._tokenizer
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", END)])
    tokenizer = Uneven(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    for text, ids in (("abc", (0, 10, 2, 3, 4)), ("a", (0, 10, 2)), ("ab</s>", (0, 10, 2, 3, 1))):
        assert encode(text, tokenizer).rows[0].ids == ids


# Messages of the assistant at the end


def test_a_last_message_of_the_assistant_is_continued() -> None:
    rows = [Row(BEGUN, "d"), Row(CHAT), Row("ab")]
    result = encode_rows(rows, build(True, TEMPLATE + GENERATION), 64, "error", "rows")
    assert result.rows[0].ids == (0, 2, 3, 1, 4)
    assert result.rows[0].text == "<s>ab</s>c"
    assert result.continued == 1


@pytest.mark.parametrize("last", ["user", "system", "tool"])
def test_after_others_the_turn_of_the_assistant_begins(last: str) -> None:
    row = encode([*BEGUN, {"role": last, "content": "c"}], build(True, TEMPLATE + GENERATION)).rows[0]
    assert row.ids == (0, 2, 3, 1, 4, 1, 4, 1, 9)
    assert not row.continues


def test_an_empty_message_of_the_assistant_is_its_turn() -> None:
    for template in (TEMPLATE, TEMPLATE.replace("['content']", "['content'] | trim")):
        row = encode([CHAT[0], {"role": "assistant", "content": " "}], build(True, template + GENERATION)).rows[0]
        assert (row.ids, row.continues) == ((0, 2, 3, 1, 9), False)


def encode_checked(rows: list[Row], tokenizer: object) -> EncodedRows:
    """As a run does it."""
    check_beginnings(rows, "rows")
    return encode_rows(rows, tokenizer, 64, "error", "rows")  # type: ignore[arg-type]


def refused(prompt: object, answer: object = None, template: str = TEMPLATE) -> str:
    row = Row(prompt, answer, where="a.jsonl, line 7", prompt_key="chat", answer_key="gold")  # type: ignore[arg-type]
    with pytest.raises(DataError) as error:
        encode_checked([row], build(True, template + GENERATION))
    text = str(error.value)
    assert "a.jsonl, line 7" in text
    assert "field 'chat'" in text
    return text


def test_a_last_message_that_gives_the_answer_is_refused() -> None:
    text = refused([CHAT[0], {"role": "assistant", "content": "a cab"}], "cab")
    for part in ("gives the answer", "field 'gold'", "'a cab'", "'cab'", "data.answer_key", "Remove that message"):
        assert part in text
    asks = [CHAT[0], {"role": "assistant", "content": "cab"}, {"role": "user", "content": "cab"}]
    encode_checked([Row(asks, "cab")], build(True, TEMPLATE))


def test_a_tool_call_cannot_be_continued() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert "tool call of the assistant" in refused([CHAT[0], call])


def test_a_template_that_changes_the_beginning_is_named() -> None:
    text = refused(BEGUN, template=TEMPLATE.replace("message['content']", "message['content'][1:]"))
    assert "chat template cannot render" in text
    assert "ValueError: continue_final_message is set" in text


# What templates and tokenizers raise


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('only user') }}", "TemplateError: only user"),
        ("{{ messages[9]['content'] + 'a' }}", "UndefinedError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages | map('nothing') | list }}", "TemplateRuntimeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_errors_of_templates_name_the_row(template: str, said: str) -> None:
    assert said in refused(CHAT, template=template + "{{ messages }}")


def test_what_cannot_be_tokenised_names_the_row() -> None:
    assert "tokenizer cannot read the prompt" in refused("a\ud800")
    assert "chat template cannot render" in refused([{"role": "user", "content": "\ud800"}])


def test_a_panic_of_a_tokenizer_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As of the tokenizers' Rust code."""

    def panics(*_: Any, **__: Any) -> Any:
        raise PanicException("index out of bounds")

    tokenizer = build(True)
    monkeypatch.setattr(type(tokenizer), "__call__", panics)
    with pytest.raises(DataError, match=r"rows, row 1: .*PanicException: index out of bounds"):
        encode("a", tokenizer)
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        encode("a", tokenizer)


def test_a_run_says_how_many_beginnings_it_continues(tmp_path: Path) -> None:
    import json

    from tandem.launch.assembly.inputs import training_prompts
    from tandem.platform.config.schema import Config

    config, notes = Config(), list[str]()
    config.data.train, config.reward.functions = str(tmp_path / "a.jsonl"), {"exact_match": 1.0}
    rows = [{"prompt": prompt, "answer": "d"} for prompt in (BEGUN, CHAT, "ab")]
    Path(config.data.train).write_text("\n".join(json.dumps(row) for row in rows))
    Qwen2ForCausalLM(small_config(11)).save_pretrained(tmp_path / "model")
    training_prompts(config, str(tmp_path / "model"), build(True, TEMPLATE + GENERATION), notes.append)
    assert f"{config.data.train}: 1 of 3 prompts end with an assistant message, which the policy continues" in notes
