"""A reward model: a sequence classifier with one score, read at the last token of a text."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tandem.platform.batch import real_tokens
from tandem.platform.config import ConfigError
from tandem.workers.footprint import model_bytes
from tandem.workers.models import LOAD_ERRORS, cannot_load
from tandem.workers.tokenizer import load_tokenizer

MAX_TOKENS_PER_BATCH = 16384  # padding included


class RewardModel:
    """Scores whole texts. A text's score is the same alone and in any batch."""

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        """Loads model and tokenizer from a folder or hub name; ValueError if it has not exactly one trained score."""
        try:
            config = AutoConfig.from_pretrained(path)
        except LOAD_ERRORS as error:
            raise cannot_load(f"reward.model={path}", path, error) from error
        if config.num_labels != 1:
            raise ConfigError(f"reward.model={path} has {config.num_labels} labels; a reward model has num_labels=1")
        if config.is_encoder_decoder:
            raise ConfigError(f"reward.model={path} is an encoder-decoder; use a decoder or an encoder")
        self._tokenizer = load_tokenizer(path)
        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
        except LOAD_ERRORS as error:
            raise cannot_load(f"reward.model={path}", path, error) from error
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:3])
            raise ConfigError(f"reward.model={path} is no trained reward model: its checkpoint lacks {missing}")
        self._path, self._model = path, model.to(device).eval()
        self._longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The model's own token ids of a text, with one begin token if the tokenizer has one."""
        begin = self._tokenizer.bos_token
        has_begin = bool(begin) and text.startswith(begin)
        ids: list[int] = self._tokenizer(text, add_special_tokens=not has_begin)["input_ids"]
        if self._longest is not None and len(ids) > self._longest:
            raise ConfigError(f"reward.model={self._path} takes {self._longest} tokens, but a text has {len(ids)}")
        return ids

    def score(self, texts: Sequence[str]) -> list[float | None]:
        """One score per text, in order; None for a text without tokens."""
        ids = [self.encode(text) for text in texts]
        scores: list[float | None] = [None] * len(texts)
        with self._lock, torch.inference_mode():
            for rows in _batches([len(row) for row in ids]):
                for row, score in zip(rows, self._score([ids[row] for row in rows]).tolist(), strict=True):
                    scores[row] = score
        return scores

    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return model_bytes(self._model)

    def _score(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """(B,) float32. Lengths alone say where a text ends: its last token may well be the padding token."""
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
        mask = real_tokens(lengths, width)
        device = next(self._model.parameters()).device
        inputs = {"input_ids": tokens.to(device), "attention_mask": mask.long().to(device)}
        head = getattr(self._model, "score", None)
        if not isinstance(head, nn.Module):  # an encoder: its head pools the first token, under the attention mask
            logits: Tensor = self._model(**inputs).logits
            return logits[:, 0].float()
        hidden = self._model.base_model(**inputs, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids), device=device), (lengths - 1).to(device)]
        scores: Tensor = head(last)[:, 0]
        return scores.float()


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers of texts that have tokens, sorted by length and cut by MAX_TOKENS_PER_BATCH."""
    batches: list[list[int]] = []
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= MAX_TOKENS_PER_BATCH:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
