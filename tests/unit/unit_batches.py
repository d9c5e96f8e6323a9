"""Small hand-made batches for the unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, StopReason


def make_rollout(
    prompt: Sequence[int] = (3, 4),
    response: Sequence[int] = (5, 6),
    *,
    group: int = 0,
    mask: Sequence[bool] | None = None,
    stop: StopReason = StopReason.STOP,
    version: int = 0,
    text: str = "",
    answer: Any = None,
) -> Rollout:
    """A rollout; by default two prompt and two response tokens, all written by the policy."""
    written = tuple([True] * len(response) if mask is None else mask)
    logprobs = tuple(-0.5 for _ in response)
    return Rollout(Prompt(tuple(prompt), group, "prompt", answer), tuple(response), written, logprobs, stop, version, text)


def scores(*rewards: float | None) -> list[Score]:
    """Scores with these rewards."""
    return [Score(reward) for reward in rewards]


def batch_of(mask: Tensor, token_rewards: Tensor | None = None, **changes: Tensor) -> RolloutBatch:
    """A batch with this response mask (B, T); by default one group, all scored, none truncated, full width."""
    b, t = mask.shape
    fields: dict[str, Tensor] = {
        "tokens": torch.arange(b * t).reshape(b, t) % 7,
        "response_mask": mask,
        "rollout_logprobs": torch.zeros(b, t),
        "lengths": torch.full((b,), t),
        "group_ids": torch.zeros(b, dtype=torch.int64),
        "rewards": torch.zeros(b),
        "scored": torch.ones(b, dtype=torch.bool),
        "truncated": torch.zeros(b, dtype=torch.bool),
        "policy_version": torch.zeros(b, dtype=torch.int64),
        "token_rewards": torch.zeros(b, t) if token_rewards is None else token_rewards,
        "accuracies": torch.zeros(b),
        "baselines": torch.full((b,), float("nan")),
        "muted": torch.zeros(b, dtype=torch.bool),
        "step_ends": torch.zeros(b, t, dtype=torch.bool),
    }
    return RolloutBatch(**{**fields, **changes})


def random_mask(generator: torch.Generator, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """(mask (B, T), lengths (B,)): prompts of one token or more, responses with gaps, some of them empty."""
    mask = torch.zeros(rows, width, dtype=torch.bool)
    lengths = torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):
        length = int(torch.randint(1, width + 1, (), generator=generator))
        start = int(torch.randint(1, length + 1, (), generator=generator))
        mask[row, start:length] = torch.rand(length - start, generator=generator) < 0.8
        lengths[row] = length
    return mask, lengths


def poison(values: Tensor, mask: Tensor, poison: float) -> Tensor:
    """`values` with `poison` wherever the mask is False."""
    return torch.where(mask, values, torch.full_like(values, poison))
