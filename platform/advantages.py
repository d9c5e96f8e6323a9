"""Advantage estimators: from rewards (and values) to advantages (and returns). Pure functions.

Legend of `batch.py`: B sequences, T tokens; index t speaks of token t. Tokens outside the response mask are skipped: the
result equals that of the sequence with those tokens taken out, so a tool's output inside a response changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.platform.masked import EPS, masked_fill_zero


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    final_values: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns, both (B, T) float32 and 0 outside the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    where t + 1 is the next token that the mask selects. After the last one, V is `final_values`: 0 for a response that
    ended, the critic's value of the whole sequence for one that is bootstrapped.

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, eq. 11 and 16,
    https://arxiv.org/abs/1506.02438

    Args:
        token_rewards, values: (B, T) float32. mask: (B, T) bool. final_values: (B,) float32.
    """
    assert token_rewards.shape == values.shape == mask.shape, "token_rewards, values and mask differ in shape"
    assert final_values.shape == mask.shape[:1], f"final_values {tuple(final_values.shape)}, expected ({mask.shape[0]},)"
    rewards, values = masked_fill_zero(token_rewards, mask), masked_fill_zero(values, mask)
    advantages = torch.zeros_like(values)
    next_value, next_advantage = final_values, torch.zeros_like(final_values)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, advantages[:, t])
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, advantages + values


def outcomes(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """(B,) float32: the sum of the rewards on the tokens that the mask selects now; 0 for an empty response."""
    return masked_fill_zero(token_rewards, mask).sum(dim=1)


def group_relative(scores: Tensor, group_ids: Tensor, scored: Tensor, *, group_std: str) -> Tensor:
    """How much better than its group each sample is: (B,) float32.

        A_i = (r_i - mean(r)) / (std(r) + eps)        eps = 1e-6

    over the scored samples of the same group id, wherever they stand in the batch. `group_std`: "sample" (n - 1),
    "population" (n) or "none" (divides by 1, as in Dr. GRPO). A group whose scores are all equal, or that has one scored
    sample, gets exactly 0; so does a sample that is not scored.

    Shao et al., DeepSeekMath, section 4.1.2, https://arxiv.org/abs/2402.03300 ; without the std: Liu et al.,
    Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783

    Args:
        scores: (B,) float32. group_ids: (B,) int64. scored: (B,) bool.
    """
    assert scores.shape == group_ids.shape == scored.shape, "scores, group_ids and scored differ in shape"
    advantages = torch.zeros_like(scores)
    for group in sorted(set(group_ids.tolist())):
        members = (group_ids == group) & scored
        values = scores[members].double()
        # A constant group is found by comparing, not by its std, which float rounding makes non-zero.
        if len(values) < 2 or values.max() == values.min():
            continue
        scale = {"sample": values.std(), "population": values.std(correction=0), "none": values.new_ones(())}[group_std]
        eps = 0.0 if group_std == "none" else EPS
        advantages[members] = ((values - values.mean()) / (scale + eps)).to(scores.dtype)
    return advantages


def zero_std_groups(scores: Tensor, group_ids: Tensor, scored: Tensor) -> tuple[int, int]:
    """(groups that carry no signal, groups): those whose scored samples are fewer than two or all equal."""
    groups = set(group_ids.tolist())
    silent = 0
    for group in groups:
        values = scores[(group_ids == group) & scored]
        silent += int(len(values) < 2 or bool(values.max() == values.min()))
    return silent, len(groups)
