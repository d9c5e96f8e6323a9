"""Log-probs and entropies from logits, on the token axis of `batch.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LEAST = -1e30  # stands for a log-prob of -inf


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log p(token t | tokens before t) under the sampling distribution: (B, T) float32, 0 at t = 0.

        log softmax(logits[:, t - 1] / temperature)[tokens[:, t]]

    Args:
        logits: (B, T, V), position t predicts token t + 1. tokens: (B, T) int64; padding may hold any id.
    """
    assert logits.shape[:2] == tokens.shape, f"logits {tuple(logits.shape)} but tokens {tuple(tokens.shape)}"
    scaled = logits[:, :-1].float() / temperature
    targets = tokens[:, 1:].clamp(min=0, max=logits.shape[2] - 1).unsqueeze(-1)
    chosen = scaled.gather(-1, targets).squeeze(-1)
    return pad(chosen - scaled.logsumexp(dim=-1), (1, 0))


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """log p - log q, float32, same shape as both. Where both are -inf, returns 0 instead of NaN."""
    assert logprobs.shape == others.shape, f"log-probs of shapes {tuple(logprobs.shape)} and {tuple(others.shape)}"
    return logprobs.float().clamp(min=LEAST) - others.float().clamp(min=LEAST)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of the distribution that token t is sampled from, in nats: (B, T) float32, 0 at t = 0.

    H_t = - sum_v p_v log p_v        with 0 log 0 = 0, so a logit of -inf keeps the value and the gradient finite
    """
    return pad(entropy(logits[:, :-1].float() / temperature), (1, 0))


def entropy(logits: Tensor) -> Tensor:
    """Entropy (...) in nats of softmax(logits (..., V))."""
    logp = logits.float().log_softmax(dim=-1)
    possible = logp > -torch.inf
    finite = torch.where(possible, logp, torch.zeros_like(logp))
    return -(torch.where(possible, logp.exp(), torch.zeros_like(logp)) * finite).sum(dim=-1)
