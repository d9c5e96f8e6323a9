"""Advantage estimators: pure functions from rewards (and values) to advantages (and returns).

Notation of `batch.py`: B sequences, T tokens; index t refers to token t. Tokens outside the response mask are skipped: the
result is the same as for the sequence without these tokens, so tool output inside a response changes nothing.
`ALGORITHMS.md` lists all formulas side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tandem.platform.experience.masked import EPS, masked_fill_zero


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, final_values: Tensor, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns, both (B, T) float32, 0 outside the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    where t + 1 is the next token that the mask selects. V after the last token is `final_values`: 0 for a complete
    response, the critic's value of the whole sequence for a bootstrapped response.

    Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, eq. 11 and 16,
    https://arxiv.org/abs/1506.02438

    Args:
        token_rewards, values: (B, T) float32. mask: (B, T) bool. final_values: (B,) float32.
        lam: one number for all rows, or one per row (B,) float32.
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


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Lambda of each row, computed from the length of its response: (B,) float32 in [0, 1).

        lam = max(0, 1 - 1 / (alpha * l))        l: tokens that the mask selects

    The weights lam^k that GAE gives to future errors then sum to alpha * l, in proportion to the length.

    Yue et al., VAPO, section 4.2, https://arxiv.org/abs/2504.05118
    """
    lengths = mask.sum(dim=1).clamp(min=1)
    return (1 - 1 / (alpha * lengths.float())).clamp(min=0.0)


def outcomes(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """(B,) float32: the sum of the rewards on the tokens that the mask selects; 0 for an empty response."""
    return masked_fill_zero(token_rewards, mask).sum(dim=1)


def rewards_to_go(token_rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted rewards-to-go of each token: (B, T) float32, 0 outside the mask.

        G_t = r_t + gamma * G_{t+1}        t + 1: the next token that the mask selects

    Williams, Simple Statistical Gradient-Following Algorithms, 1992. With a KL penalty in r_t, and followed by whitening
    over the batch, this is REINFORCE++: Hu et al., https://arxiv.org/abs/2501.03262
    """
    nothing = torch.zeros_like(token_rewards[:, 0])
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, nothing, gamma=gamma, lam=1.0)[0]


Baseline = Callable[[Tensor], Tensor]
"""(n,) float64 scores of a group, not all equal -> (n,) float64 advantages."""


def group_relative(scores: Tensor, group_ids: Tensor, scored: Tensor, *, group_std: str) -> Tensor:
    """Advantage of each sample relative to its group: (B,) float32.

        A_i = (r_i - mean(r)) / (std(r) + eps)        eps = 1e-6

    over the scored samples with the same group id, at any position in the batch. `group_std`: "sample" (n - 1),
    "population" (n) or "none" (divides by 1, as in Dr. GRPO). A group whose scores are all equal, or with only one scored
    sample, gets exactly 0; so does an unscored sample.

    Shao et al., DeepSeekMath, section 4.1.2, https://arxiv.org/abs/2402.03300 ; without the std: Liu et al.,
    Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783

    Args:
        scores: (B,) float32. group_ids: (B,) int64. scored: (B,) bool.
    """

    def relative(values: Tensor) -> Tensor:
        return (values - values.mean()) / _spread(values, group_std)

    return _per_group(scores, group_ids, scored, relative)


def leave_one_out(scores: Tensor, group_ids: Tensor, scored: Tensor) -> Tensor:
    """Advantage of each sample over the other samples of its group: (B,) float32. Arguments as in `group_relative`.

        A_i = r_i - mean of r_j over j != i  =  n / (n - 1) * (r_i - mean(r))

    Ahmadian et al., Back to Basics (RLOO), eq. 6, https://arxiv.org/abs/2402.14740
    """

    def left_out(values: Tensor) -> Tensor:
        return (values - values.mean()) * (len(values) / (len(values) - 1))

    return _per_group(scores, group_ids, scored, left_out)


def length_weighted(scores: Tensor, lengths: Tensor, group_ids: Tensor, scored: Tensor) -> Tensor:
    """Advantage of each sample over the length-weighted mean of its group: (B,) float32.

        A_i = r_i - sum_j l_j r_j / sum_j l_j        l: tokens the policy wrote

    This baseline has the lowest gradient variance if the squared gradient norm of a response grows with its length. Meant
    for one update per batch. A group without any token gets 0.

    Hao et al., On-Policy RL with Optimal Reward Baseline (OPO), eq. 8, https://arxiv.org/abs/2505.23585

    Args:
        lengths: (B,) int64; the other arguments as in `group_relative`.
    """
    assert lengths.shape == scores.shape, "lengths and scores differ in shape"
    advantages = torch.zeros_like(scores)
    for members, values in _groups(scores, group_ids, scored):
        weights = lengths[members].double()
        if weights.sum() > 0:
            advantages[members] = (values - (weights * values).sum() / weights.sum()).to(scores.dtype)
    return advantages


def batch_relative(scores: Tensor, scored: Tensor) -> Tensor:
    """Advantage of each sample over the batch mean: (B,) float32, 0 where not scored.

        A_i = r_i - mean(r)        over all scored samples of the batch

    REINFORCE with a batch-mean baseline: Williams, 1992; Greensmith et al., Variance Reduction Techniques, 2004.
    """
    return _per_group(scores, torch.zeros_like(scores, dtype=torch.int64), scored, lambda values: values - values.mean())


def against_greedy(scores: Tensor, baselines: Tensor, scored: Tensor) -> Tensor:
    """Advantage of each sample over the greedy response to its prompt: (B,) float32.

        A_i = r_i - r(greedy response)

    0 where the sample or its greedy response is not scored (`baselines` is NaN for the latter).
    Li et al., ReMax, eq. 5, https://arxiv.org/abs/2310.10505

    Args:
        scores, baselines: (B,) float32. scored: (B,) bool.
    """
    assert scores.shape == baselines.shape == scored.shape, "scores, baselines and scored differ in shape"
    return torch.where(scored & baselines.isfinite(), scores - baselines, 0.0)


def process_relative(
    token_rewards: Tensor, step_ends: Tensor, mask: Tensor, group_ids: Tensor, scored: Tensor, *, group_std: str
) -> Tensor:
    """Process supervision: sums the normalised rewards of the current and later steps. (B, T) float32, 0 outside the mask.

        r'_k = (r_k - mean(r)) / (std(r) + eps)        over all steps of all samples of the group
        A_t  = sum of r'_k over the steps k that end at t or later

    A step ends at each token that both `step_ends` and the mask select. Its reward is the sum of `token_rewards` since the
    previous step, including any KL penalty. A group with only one step, or whose steps all have the same reward, gets
    exactly 0.

    Shao et al., DeepSeekMath, section 4.1.3, https://arxiv.org/abs/2402.03300

    Args:
        token_rewards: (B, T) float32. step_ends, mask: (B, T) bool. group_ids: (B,) int64. scored: (B,) bool.
    """
    assert token_rewards.shape == step_ends.shape == mask.shape, "token_rewards, step_ends and mask differ in shape"
    ends = step_ends & mask
    earned = masked_fill_zero(token_rewards, mask).double().cumsum(dim=1)
    rows, columns = ends.nonzero(as_tuple=True)
    totals = earned[rows, columns]
    before = torch.cat([totals.new_zeros(1), totals[:-1]])
    first = torch.cat([rows.new_ones(1, dtype=torch.bool), rows[1:] != rows[:-1]])[: len(rows)]
    worth = totals - torch.where(first, 0.0, before[: len(rows)])
    normalised = torch.zeros_like(earned)
    for members, values in _groups(worth, group_ids[rows], scored[rows]):
        normalised[rows[members], columns[members]] = (values - values.mean()) / _spread(values, group_std)
    to_go = normalised.flip(1).cumsum(dim=1).flip(1)
    return masked_fill_zero(to_go.to(token_rewards.dtype), mask)


def is_constant(values: Tensor) -> bool:
    """Whether a group carries no signal: fewer than two scores, or all equal.

    Compares the scores instead of testing the std, which float rounding can make non-zero.
    """
    return len(values) < 2 or bool(values.max() == values.min())


def _groups(scores: Tensor, group_ids: Tensor, scored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(mask of the members (B,) bool, their scores in float64) of every group that carries signal."""
    assert scores.shape == group_ids.shape == scored.shape, "scores, group_ids and scored differ in shape"
    for group in sorted(set(group_ids.tolist())):
        members = (group_ids == group) & scored
        values = scores[members].double()
        if not is_constant(values):
            yield members, values


def _per_group(scores: Tensor, group_ids: Tensor, scored: Tensor, baseline: Baseline) -> Tensor:
    advantages = torch.zeros_like(scores)
    for members, values in _groups(scores, group_ids, scored):
        advantages[members] = baseline(values).to(scores.dtype)
    return advantages


def _spread(values: Tensor, group_std: str) -> Tensor:
    """The divisor of a group's advantages."""
    if group_std == "none":
        return values.new_ones(())
    return {"sample": values.std(), "population": values.std(correction=0)}[group_std] + EPS
