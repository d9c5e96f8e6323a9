"""Forward passes over a batch in micro-batches, the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.platform.experience.batch import RolloutBatch, TrainBatch, real_tokens
from tandem.platform.experience.partition import microbatches
from tandem.workers.training.backend import TrainerBackend

TokenPass = Callable[[Callable[..., Any], RolloutBatch], Tensor]
"""(forward pass, micro-batch on the device) -> (rows, columns) of numbers, on the token axis."""


def infer_rows(
    forward: Callable[..., Any],
    batch: RolloutBatch,
    device: torch.device,
    max_tokens: int,
    score: TokenPass,
    passes: int = 0,
) -> Tensor:
    """`score` of every row: (B, T) float32 on the CPU, 0 in the padding. Runs at least `passes` forward passes."""
    width = batch.tokens.shape[1]
    result = torch.zeros(len(batch), width)
    parts = microbatches(batch.lengths.tolist(), max_tokens)
    with torch.no_grad():
        for rows in parts:
            part = batch.select(rows).trim().to(device)
            scores = score(forward, part).float().cpu()
            real = real_tokens(batch.lengths[rows], scores.shape[1])
            result[rows, : scores.shape[1]] = torch.where(real, scores, 0.0)
        for _ in range(passes - len(parts)):
            score(forward, batch.select([0]).trim().to(device))
    return result


def infer(backend: TrainerBackend, batch: RolloutBatch, max_tokens: int, score: TokenPass) -> Tensor:
    """`infer_rows` on a training backend, whose ranks must run the same number of passes."""
    passes = backend.agree(len(microbatches(batch.lengths.tolist(), max_tokens)))
    return infer_rows(backend.forward, batch, backend.device, max_tokens, score, passes)


def training_parts(backend: TrainerBackend, batch: TrainBatch, max_tokens: int) -> list[TrainBatch]:
    """The micro-batches of this rank's part of a mini-batch, plus blank ones up to the largest count of any rank."""
    parts = batch.split(microbatches(batch.rollout.lengths.tolist(), max_tokens))
    missing = backend.agree(len(parts)) - len(parts)
    return parts + [batch.blank()] * missing
