"""A reward model: a sequence classifier with one score, read at the last token of a text or of token ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.batch import real_tokens
from tandem.platform.experience.partition import microbatches
from tandem.workers.models.footprint import model_bytes
from tandem.workers.models.loading import LOAD_ERRORS, cannot_load
from tandem.workers.models.tokenizer import encode_alike, load_tokenizer

MAX_TOKENS_PER_BATCH = 16384  # padding included


class RewardModel:
    """Scores whole samples, prompt and response together. The score of a sample does not depend on its batch.

    A sample is either token ids or a text. Ids must be of a tokenizer that this model `shares`, and are read unchanged. The
    model's own tokenizer encodes a text and adds special tokens, as in the model's training.
    """

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        """Loads model and tokenizer from a folder or hub name.

        Raises:
            ConfigError: there is no model, it does not have exactly one trained score, or it lacks tokens of its tokenizer.
        """
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
            raise ConfigError(f"reward.model={path} is not a trained reward model: its checkpoint lacks {missing}")
        self._path, self._model = path, model.to(device).eval()
        self._longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        self._known = self._model.get_input_embeddings().weight.shape[0]
        largest, token = max((number, token) for token, number in self._tokenizer.get_vocab().items())
        if largest >= self._known:
            raise ConfigError(
                f"reward.model={path} has {self._known} embedding rows, for tokens 0 to {self._known - 1}, but its "
                f"tokenizer's tokens go up to {largest} ({token!r}): texts with them could not be read. Resize the model's "
                f"embedding to {largest + 1} rows, or remove the tokens"
            )
        self._is_decoder = isinstance(getattr(self._model, "score", None), nn.Module)
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The model's own token ids of a text, with at most one begin token at the front."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        begin = self._tokenizer.bos_token_id
        while begin is not None and ids[:2] == [begin, begin]:  # the text contains one
            ids = ids[1:]
        return ids

    def shares(self, tokenizer: Any) -> bool:
        """Whether the model uses the same ids as this tokenizer, so it can read a sample's ids unchanged.

        False for encoders: they are trained on texts between special tokens of their own.
        """
        return self._is_decoder and encode_alike(self._tokenizer, tokenizer)

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether the model has all of these token ids; a policy can sample ids that no tokenizer has."""
        return max(ids, default=0) < self._known

    def score(self, samples: Sequence[str | Sequence[int]]) -> list[float | None]:
        """One score per sample, in order; None for a sample without tokens.

        Raises:
            ConfigError: a sample has more tokens than the model has positions for.
        """
        ids = [self.encode(sample) if isinstance(sample, str) else list(sample) for sample in samples]
        self._check_lengths(ids)
        scores: list[float | None] = [None] * len(samples)
        with self._lock, torch.inference_mode():
            for rows in _batches([len(row) for row in ids]):
                for row, score in zip(rows, self._score([ids[row] for row in rows]).tolist(), strict=True):
                    scores[row] = score
        return scores

    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return model_bytes(self._model)

    def _check_lengths(self, ids: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, ids), default=0)
        if self._longest is not None and longest > self._longest:
            raise ConfigError(f"reward.model={self._path} takes {self._longest} tokens, but a text has {longest}")

    def _score(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """(B,) float32 scores. Only lengths mark the ends of texts: a text's last token may be the padding token."""
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
        mask = real_tokens(lengths, width)
        device = next(self._model.parameters()).device
        inputs = {"input_ids": tokens.to(device), "attention_mask": mask.long().to(device)}
        if not self._is_decoder:  # the head of an encoder reads the first token
            logits: Tensor = self._model(**inputs).logits
            return logits[:, 0].float()
        hidden = self._model.base_model(**inputs, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(ids), device=device), (lengths - 1).to(device)]
        scores: Tensor = self._model.score(last)[:, 0]
        return scores.float()


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers of texts that have tokens, in batches of up to MAX_TOKENS_PER_BATCH."""
    rows = [row for row, length in enumerate(lengths) if length]
    return [
        [rows[place] for place in batch] for batch in microbatches([lengths[row] for row in rows], MAX_TOKENS_PER_BATCH)
    ]
