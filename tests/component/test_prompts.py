"""Prompt tokens from real tokenizers: one BOS at most, chat templates applied once, overlong prompts."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tandem.platform.data import DataError, Row
from tandem.platform.prompts import EncodedRows, encode_rows

CHARACTERS = "abcdefgh "
BOS, END = 0, 1
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ 'h' }}{% endif %}"
CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


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
    assert row.ids == (0, 2, 3, 1, 4, 1, 9)
    assert row.text == "<s>ab</s>c</s>h"


def test_template_that_emits_bos_twice_gives_one() -> None:
    assert encode(CHAT, build(True, "{{ bos_token }}" + TEMPLATE)).rows[0].ids == (0, 2, 3, 1, 4, 1)


def test_tokenizer_without_bos() -> None:
    tokenizer = build(adds_bos=False, template=TEMPLATE.removeprefix("{{ bos_token }}") + GENERATION, has_bos=False)
    assert encode("ab", tokenizer).rows[0].ids == (2, 3)
    assert encode(CHAT, tokenizer).rows[0].ids == (2, 3, 1, 4, 1, 9)
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
    with pytest.raises(DataError, match=r"rows: all 1 prompts .*data\.max_prompt_tokens=2.* leaves none"):
        encode("abcd", build(adds_bos=False), 2, "drop")


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="rows: no rows"):
        encode_rows([], build(adds_bos=False), 2, "error", "rows")


def test_prompt_without_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match="rows, row 1: the prompt has no tokens"):
        encode("", build(adds_bos=False))
