"""The start of a critic: with a zero head or a reward model's head, on a body of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_config
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from tandem.launch.assembly import inputs
from tandem.platform.config.schema import Config, ConfigError, CriticConfig, ModelConfig, TrainerConfig
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, StopReason, TrainBatch
from tandem.platform.loop.metrics import reduce_totals
from tandem.workers.cluster.runtime import Rank
from tandem.workers.models.loading import load_critic
from tandem.workers.models.reward_model import RewardModel
from tandem.workers.models.tiny import character_tokenizer
from tandem.workers.models.value import ValueModel
from tandem.workers.roles.critic import CriticSpec, CriticWorker

TOKENIZER = character_tokenizer("0123456789+=")
TEXTS = ["3+4=7", "12+34=46", "9+9=", "1"]


def save(folder: Path, kind: Any = Qwen2ForSequenceClassification, *, labels: int = 1, hidden: int = 16) -> str:
    torch.manual_seed(0)
    kind(small_config(len(TOKENIZER), hidden, pad_token_id=0, num_labels=labels)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("reward"))


def critic(path: str, head: str) -> CriticWorker:
    config = CriticConfig(path=path, head=head, lr=1e-2, eps=1e-4)
    worker = CriticWorker(CriticSpec(path, ModelConfig(), config, TrainerConfig(), "token-mean", 8, 10_000, 60), Rank())
    worker.start()
    return worker


def as_batch(texts: list[str]) -> RolloutBatch:
    """A batch of texts: the first character is the prompt, the rest is the response."""
    rollouts = []
    for text in texts:
        first, *rest = TOKENIZER(text)["input_ids"]
        mask, logprobs = (True,) * len(rest), (-1.0,) * len(rest)
        rollouts.append(Rollout(Prompt((first,), 0, text), tuple(rest), mask, logprobs, StopReason.STOP, 0, ""))
    return RolloutBatch.from_rollouts(rollouts, [Score(reward=1.0)] * len(texts))


def train_batch(batch: RolloutBatch) -> TrainBatch:
    nothing = torch.zeros(batch.tokens.shape)
    return TrainBatch(batch, nothing, nothing, old_values=nothing, returns=nothing + 1.0).as_minibatch()


def weights(worker: CriticWorker) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in worker.backend.named_weights(1 << 20) for name, tensor in bucket.items()}


def test_a_score_head_gives_a_text_its_score(reward_path: str) -> None:
    scores = RewardModel(reward_path).score(TEXTS)
    assert critic(reward_path, "score").values(as_batch(TEXTS)).final.tolist() == pytest.approx(scores, abs=1e-5)
    assert min(abs(score) for score in scores if score is not None) > 1e-3


def test_a_score_head_gives_every_prefix_its_score(reward_path: str) -> None:
    scores = RewardModel(reward_path).score(["1", "12", "12+", "12+3", "12+34"])
    values = critic(reward_path, "score").values(as_batch(["12+34=", "3"])).values
    assert values[0].tolist() == pytest.approx([0.0, *(score for score in scores if score is not None)], abs=1e-5)
    assert values[1].tolist() == [0.0] * 6


@pytest.mark.parametrize("kind", [Qwen2ForCausalLM, Qwen2ForSequenceClassification])
def test_a_zero_head_gives_zeros_on_any_body(tmp_path: Path, kind: Any) -> None:
    worker = critic(save(tmp_path, kind), "zero")
    found = worker.values(as_batch(TEXTS))
    assert found.values.abs().max() == 0
    assert found.final.abs().max() == 0
    body = AutoModel.from_pretrained(tmp_path).state_dict()
    own = weights(worker)
    assert {name for name in own if name.startswith("body.")} == {f"body.{name}" for name in body}
    assert all(torch.equal(own[f"body.{name}"], tensor) for name, tensor in body.items())


@pytest.mark.parametrize("head", ["zero", "score"])
def test_a_critic_has_a_size_of_its_own(reward_path: str, tiny_path: str, head: str) -> None:
    small, large = critic(reward_path, head), critic(tiny_path, "zero")
    assert small.memory()["weights"] < large.memory()["weights"] / 4
    batch = as_batch(TEXTS)
    assert small.values(batch).values.shape == large.values(batch).values.shape == batch.tokens.shape
    before, start = weights(small), small.values(batch).final
    losses = [reduce_totals([small.update([train_batch(batch)])])["critic/loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    assert not torch.equal(small.values(batch).final, start)
    assert not torch.equal(weights(small)["head.weight"], before["head.weight"])


def test_the_bias_of_a_score_head_comes_along(reward_path: str) -> None:
    model = ValueModel(AutoModel.from_pretrained(reward_path))
    score = nn.Linear(16, 1)
    nn.init.constant_(score.bias, 0.75)
    model.start_from(score)
    assert torch.equal(model.head.weight, score.weight)
    assert model.head.bias.item() == 0.75
    assert model.head.weight.requires_grad
    model = load_critic(reward_path, ModelConfig(), "score")
    assert model.head.bias.item() == 0.0


@pytest.mark.parametrize(
    ("labels", "why"), [(2, "it has 2 labels, a reward model has one"), (1, r"its checkpoint lacks score\.weight")]
)
def test_a_language_model_has_no_score_head(tmp_path: Path, labels: int, why: str) -> None:
    path = save(tmp_path, Qwen2ForCausalLM, labels=labels)
    message = rf"critic\.head=score .*critic\.path={path} has none: {why}.*critic\.head=zero"
    with pytest.raises(ConfigError, match=message):
        critic(path, "score")


def test_an_encoder_has_no_score_head(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"critic\.head=score .* no linear layer called score"):
        load_critic(str(tmp_path), ModelConfig(), "score")


def test_a_missing_score_head_is_found_before_any_role_starts(tmp_path: Path, reward_path: str) -> None:
    config = Config()
    config.critic = replace(config.critic, path=reward_path, head="score")
    inputs.check_critic(config, reward_path, TOKENIZER)
    config.critic.path = save(tmp_path, Qwen2ForCausalLM, labels=2)
    with pytest.raises(ConfigError, match=r"critic\.head=score .* it has 2 labels"):
        inputs.check_critic(config, reward_path, TOKENIZER)
    config.critic.head = "zero"
    inputs.check_critic(config, reward_path, TOKENIZER)
    config.critic.path, config.critic.head = str(tmp_path / "gone"), "score"
    with pytest.raises(ConfigError, match=r"critic\.path=.*gone cannot be loaded: there is no such folder"):
        inputs.check_critic(config, reward_path, TOKENIZER)
