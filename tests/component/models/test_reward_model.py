"""A reward model's score of a text is read at the text's last token and does not depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from small_models import small_config
from small_tokenizers import bert_like
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from tandem.platform.config.schema import ConfigError, RewardConfig
from tandem.platform.experience.batch import Prompt, Rollout, StopReason
from tandem.platform.rewards.functions import RewardError
from tandem.workers.cluster.runtime import Rank
from tandem.workers.models import reward_model
from tandem.workers.models.reward_model import RewardModel
from tandem.workers.roles.reward import RewardRank, RewardSpec, RewardWorker

END = "</s>"  # one token for both end and padding, as in many released models
TEXTS = ["3+4=7", "1+1=2 and a longer text", "9", f"3+4=7{END}", f"1{END}2{END}{END}", "12+34=46"]


def save(path: Path, num_labels: int = 1, begin: str | None = None) -> str:
    torch.manual_seed(0)
    vocabulary = {token: i for i, token in enumerate([END, "<s>", "<unk>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, bos_token=begin)
    fast.save_pretrained(path)
    own = {"num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 0}
    config = small_config(len(vocabulary), hidden=32, **own, num_labels=num_labels)
    Qwen2ForSequenceClassification(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def model(path: str) -> Iterator[RewardModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield RewardModel(path)
    torch.set_num_threads(threads)


def by_hand(path: str, text: str) -> float:
    """The expected score: the head's output at the last token of an unpadded text."""
    network = Qwen2ForSequenceClassification.from_pretrained(path).eval()
    ids = PreTrainedTokenizerFast.from_pretrained(path)(text)["input_ids"]
    with torch.inference_mode():
        hidden = network.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return network.score(hidden).item()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(path: str, tmp_path: Path) -> None:
    """A reward model is refused if tokens were added to its tokenizer without resizing the embedding."""
    other = save(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match=rf"has {rows} embedding rows.*go up to {rows + 1} \('<b>'\).*to {rows + 2} rows"):
        RewardModel(other)


def test_scores_are_read_at_the_last_token_of_each_text(model: RewardModel, path: str) -> None:
    expected = [by_hand(path, text) for text in TEXTS]
    assert [model.score([text])[0] for text in TEXTS] == pytest.approx(expected, abs=1e-4)
    assert model.score(TEXTS) == pytest.approx(expected, abs=1e-4)
    assert model.score(TEXTS[::-1]) == pytest.approx(expected[::-1], abs=1e-4)
    assert max(expected) - min(expected) > 1e-2


def test_small_batches_change_nothing(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model.score(TEXTS)
    monkeypatch.setattr(reward_model, "MAX_TOKENS_PER_BATCH", 20)
    assert reward_model._batches([5, 23, 1, 0, 9, 10]) == [[2, 0], [4, 5], [1]]
    assert model.score(TEXTS) == pytest.approx(whole, abs=1e-4)


def test_padding_is_never_read(model: RewardModel, path: str) -> None:
    ids = model.encode("3+4=7")
    padded = model._score([ids, ids * 4])
    assert padded[0].item() == pytest.approx(model._score([ids])[0].item(), abs=1e-4)


def test_texts_are_tokenised_once_by_its_own_tokenizer(model: RewardModel, tmp_path: Path) -> None:
    assert model.encode(f"3 + 4 = 7{END}") == [*(ord(c) - 29 for c in "3 + 4 = 7"), 0]
    assert RewardModel(save(tmp_path, begin="<s>")).encode("<s>3") == [1, ord("3") - 29]


def test_a_text_without_tokens_has_no_score(model: RewardModel) -> None:
    assert model.score(["", "7"])[0] is None
    assert model.score([]) == []


def test_wrong_models_and_long_texts_are_refused(model: RewardModel, path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 labels"):
        RewardModel(save(tmp_path / "two", num_labels=2))
    one = Qwen2Config.from_pretrained(path)
    PreTrainedTokenizerFast.from_pretrained(path).save_pretrained(tmp_path / "lm")
    Qwen2ForCausalLM(one).save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"not a trained reward model: its checkpoint lacks score\.weight"):
        RewardModel(str(tmp_path / "lm"))
    with pytest.raises(ValueError, match="takes 64 tokens, but a text has 65"):
        model.score(["7" * 65])


def rollout(text: str, prompt: str = "3+4=") -> Rollout:
    row = Prompt(ids=(3,), group_id=1, text=prompt, answer="7")
    return Rollout(row, (9,), (True,), (-0.5,), StopReason.STOP, 0, response_text=text)


def test_the_worker_adds_the_model_to_the_functions(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RewardWorker(RewardConfig(functions={"exact_match": 1.0}, model=path, model_weight=0.5))
    try:
        right, wrong = worker.score([rollout("7"), rollout("8")])
        score = by_hand(path, "3+4=7")
        assert right.parts == {"exact_match": 1.0, "model": pytest.approx(score, abs=1e-4)}
        assert right.reward == pytest.approx(1.0 + 0.5 * score, abs=1e-4)
        assert wrong.reward == pytest.approx(0.5 * by_hand(path, "3+4=8"), abs=1e-4)
        weights = Qwen2ForSequenceClassification.from_pretrained(path).num_parameters() * 4
        assert worker.memory()["weights"] == weights
        monkeypatch.setattr(RewardModel, "_score", lambda self, ids: torch.full((len(ids),), math.nan))
        assert worker.score([rollout("7")])[0].problem == "nan"
        monkeypatch.setattr(RewardModel, "_score", lambda self, ids: torch.full((len(ids),), math.inf))
        with pytest.raises(RewardError, match="the reward model gave an infinite score; sample 0 of group 1"):
            worker.score([rollout("7")])
    finally:
        worker.close()


# Samples as token ids, and as text


def seen_by(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Collects the rows of token ids that the network receives."""
    rows: list[list[int]] = []
    score = RewardModel._score

    def looking(self: RewardModel, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        rows.extend(list(row) for row in ids)
        return score(self, ids)

    monkeypatch.setattr(RewardModel, "_score", looking)
    return rows


def sampled(prompt: Sequence[int], response: Sequence[int], text: str = "3+4=", said: str = "7") -> Rollout:
    own = Prompt(ids=tuple(prompt), group_id=1, text=text, answer="7")
    many = len(response)
    return Rollout(own, tuple(response), (True,) * many, (-0.5,) * many, StopReason.STOP, 0, response_text=said)


def scored(reward: str, policy: str | None, rollouts: list[Rollout]) -> list[float | None]:
    worker = RewardWorker(RewardSpec(RewardConfig(functions={}, model=reward), policy))
    try:
        return [score.reward for score in worker.score(rollouts)]
    finally:
        worker.close()


def test_a_policy_of_the_same_tokenizer_is_read_as_it_sampled(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward model reads the sampled ids, including the end token and ids that encoding the text would not give."""
    seen = seen_by(RewardModel(path), monkeypatch)
    prompt, response = [1, 22, 14, 23, 32], [26, 2, 0]
    [score] = scored(path, path, [sampled(prompt, response)])
    assert seen == [prompt + response]
    network = Qwen2ForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        hidden = network.model(torch.tensor([prompt + response])).last_hidden_state[0, -1]
        assert score == pytest.approx(network.score(hidden).item(), abs=1e-4)


def test_samples_may_be_ids_and_texts_in_one_call(model: RewardModel) -> None:
    ids = [model.encode(text) for text in TEXTS]
    assert model.score([*ids, *TEXTS]) == pytest.approx(2 * model.score(TEXTS), abs=1e-4)
    assert model.score([[], ""]) == [None, None]
    with pytest.raises(ConfigError, match="takes 64 tokens, but a text has 65"):
        model.score([[5] * 65])


def changed(path: str, folder: Path, change: str) -> str:
    """The tokenizer of a folder with one change; stands in for a policy's tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    core = tokenizer.backend_tokenizer
    if change == "vocabulary":
        core.add_tokens(["==="])
    elif change == "normalizer":
        core.normalizer = normalizers.Lowercase()
    elif change == "pre_tokenizer":
        core.pre_tokenizer = pre_tokenizers.Split(Regex("[^ ]"), "isolated")
    elif change == "added":
        core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[(END, 0)])
    elif change == "template":
        tokenizer.chat_template, tokenizer.padding_side = "{{ messages }}", "left"
        core.enable_truncation(7)
        core.decoder = decoders.Fuse()
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("change", ["vocabulary", "normalizer", "pre_tokenizer", "added"])
def test_a_policy_of_another_tokenizer_is_read_as_text(
    path: str, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_by(RewardModel(path), monkeypatch)
    scored(path, changed(path, tmp_path, change), [sampled([1, 22], [26, 0])])
    assert seen == [[ord(c) - 29 for c in "3+4=7"]]


def test_how_a_tokenizer_pads_and_decodes_does_not_matter(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_by(RewardModel(path), monkeypatch)
    scored(path, changed(path, tmp_path, "template"), [sampled([1, 22], [26, 0])])
    assert seen == [[1, 22, 26, 0]]


def test_ids_that_the_model_has_no_weights_for_are_read_as_text(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(RewardModel(path), monkeypatch)
    scored(path, path, [sampled([1, 22], [26, 98])])
    assert seen == [[ord(c) - 29 for c in "3+4=7"]]


def test_a_text_has_the_special_tokens_that_the_model_was_trained_with(tmp_path: Path) -> None:
    """The tokenizer's template adds tokens before and after the text, but no second begin token."""
    path = save(tmp_path, begin="<s>")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    both = [("<s>", 1), (END, 0)]
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=both)
    tokenizer.save_pretrained(path)
    assert RewardModel(path).encode("3") == RewardModel(path).encode("<s>3") == [1, ord("3") - 29, 0]


def test_an_encoder_reads_texts_between_its_own_tokens(tmp_path: Path) -> None:
    tokenizer = bert_like()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=1, **small)).save_pretrained(tmp_path)
    model = RewardModel(str(tmp_path))
    assert not model.shares(tokenizer)
    ids = tokenizer("the answer is bad")["input_ids"]
    text, other = sampled(ids[:3], ids[3:], "the answer", " is bad"), sampled([5], [6], "the answer", " is bad")
    network = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits.item()
    assert scored(str(tmp_path), str(tmp_path), [text, other]) == pytest.approx([expected] * 2, abs=1e-4)


def test_a_model_alone_needs_no_processes(path: str) -> None:
    worker = RewardWorker(RewardConfig(functions={}, model=path))
    assert worker._pool is None
    assert list(worker.score([rollout("7")])[0].parts) == ["model"]
    worker.close()


def test_a_model_that_cannot_be_loaded_leaves_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RewardWorker] = []
    close = RewardWorker.close
    monkeypatch.setattr(RewardWorker, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(ConfigError, match=r"missing cannot be loaded: there is no such folder"):
        RewardWorker(RewardConfig(functions={"exact_match": 1.0}, model=str(tmp_path / "missing")))
    assert closed[0]._pool is not None
    assert closed[0]._pool._children == set()


def test_a_rank_picks_its_own_device(path: str) -> None:
    rank = RewardRank(RewardConfig(functions={}, model=path), Rank(device="auto"))
    rank.start()
    assert rank.score([rollout("7")])[0].reward == pytest.approx(by_hand(path, "3+4=7"), abs=1e-4)
    rank.close()
