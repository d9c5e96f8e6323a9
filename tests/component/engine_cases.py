"""Shared by the engine tests: prompts, a model that every engine can run, and the trainer's log-probs of a response."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.platform.config.schema import ModelConfig, TinyConfig
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score
from tandem.platform.loop.protocols import Sampling
from tandem.workers.engines.completion import Sampled
from tandem.workers.models.loading import batch_logprobs, load_policy
from tandem.workers.models.tiny import tiny_model

CPU = torch.device("cpu")
PROMPTS = [
    Prompt(ids=(3, 4, 5), group_id=0, text=""),
    Prompt(ids=(6, 7, 8, 9, 10, 11), group_id=1, text=""),
    Prompt(ids=(5,), group_id=2, text=""),
]
SAMPLING = Sampling(samples=4, temperature=1.0, max_tokens=12, seed=(7, 0, 1))


def pair_tokenizer() -> Any:
    """A tokenizer of ten digits and frequent pairs of digits, so many texts have several tokenizations."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    core.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", "<end>", "<pad>"], show_progress=False)
    numbers = random.Random(0)
    texts = [str(numbers.randrange(10**6)) for _ in range(300)]
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<end>", pad_token="<pad>")


def save_model(folder: Path) -> str:
    """Saves a random model with uneven token probabilities and a head size that vLLM supports on a CPU."""
    tokenizer = pair_tokenizer()
    torch.manual_seed(0)
    model = tiny_model(TinyConfig(hidden_size=64, intermediate_size=64, layers=2, heads=2), tokenizer)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
    assert model.config.tie_word_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def changed(path: str, seed: int) -> Any:
    """The model at `path` with noise on every weight."""
    model = load_policy(path, ModelConfig())
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
    return model


def trainer_logprobs(model: Any, prompts: Sequence[Prompt], sampled: Sequence[Sampled], temperature: float) -> list[Any]:
    """The trainer's log-probs of each response, from one pass over a padded batch; samples are in order of the prompts."""
    each = len(sampled) // len(prompts)
    rollouts = [
        Rollout(prompts[row // each], tuple(one.ids), (True,) * len(one.ids), tuple(one.logprobs), one.stop, 0, "")
        for row, one in enumerate(sampled)
    ]
    batch = RolloutBatch.from_rollouts(rollouts, [Score(reward=0.0)] * len(rollouts))
    with torch.no_grad():
        logprobs = batch_logprobs(model.eval(), batch, temperature)
    return [
        logprobs[row, len(one.prompt.ids) : len(one.prompt.ids) + len(one.response_ids)].tolist()
        for row, one in enumerate(rollouts)
    ]
