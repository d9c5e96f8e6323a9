"""Invariances of every objective's gradient: the split of a mini-batch into micro-batches and ranks, padding, order. Also
tests that values stay finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from algo_cases import BAD, LONGEST, ROWS, WIDTH, train_case
from torch import Tensor
from unit_batches import batch_of

from tandem.platform.algorithms.losses import AGGREGATIONS
from tandem.platform.algorithms.objectives import policy_objective
from tandem.platform.algorithms.registry import POLICY_LOSSES
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.batch import LossOutput, TrainBatch

# All terms at once: a straight-through KL, entropy, imitation; importance weights come with the batch.
ALL_TERMS: dict[str, Any] = {
    "dual_clip": 3.0,
    "kl_loss_coef": 0.3,
    "kl_loss_estimator": "k3",
    "kl_loss_gradient": "k2",
    "entropy_coef": 0.1,
    "positive_nll_coef": 0.5,
}
PARAMETERS = 6
every_objective = pytest.mark.parametrize("name", POLICY_LOSSES)
every_mode = pytest.mark.parametrize("mode", AGGREGATIONS)


class Policy:
    """Log-probs and entropies that all depend on the same few parameters."""

    def __init__(self, seed: int) -> None:
        batch, logprobs, entropy = train_case(seed)
        # The scalars below are per row, so each stays with its row when the batch is split.
        rollout = replace(batch.rollout, policy_version=torch.arange(ROWS))
        self.batch = replace(batch, rollout=rollout)
        self.logprobs, self.entropy = logprobs, entropy
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(ROWS, WIDTH, PARAMETERS, generator=generator)

    def run(self, part: TrainBatch, theta: Tensor, name: str, algo: AlgoConfig) -> LossOutput:
        rows, width = part.rollout.policy_version, part.mask.shape[1]
        moved = (self.features[rows, :width] * theta).sum(dim=-1)
        logprobs, entropy = self.logprobs[rows, :width] + moved, self.entropy[rows, :width] + moved
        return policy_objective(logprobs, entropy, part, POLICY_LOSSES[name].loss, algo, LONGEST)

    def gradient(self, parts: Sequence[TrainBatch], name: str, algo: AlgoConfig) -> tuple[Tensor, float]:
        """(gradient of the parameters, loss), summed over parts."""
        theta, loss = torch.zeros(PARAMETERS, requires_grad=True), 0.0
        for part in parts:
            output = self.run(part, theta, name, algo)
            output.loss.backward()  # type: ignore[no-untyped-call]
            loss += output.loss.item()
        assert theta.grad is not None
        return theta.grad, loss


def chunks(rows: Sequence[int], size: int) -> list[list[int]]:
    return [list(rows[n : n + size]) for n in range(0, len(rows), size)]


@every_objective
@every_mode
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_micro_batches_of_any_size_give_the_gradient_of_the_whole(name: str, mode: str, size: int) -> None:
    algo = AlgoConfig(**ALL_TERMS, loss_aggregation=mode)
    for seed in range(3):
        policy = Policy(seed)
        whole, loss = policy.gradient([policy.batch], name, algo)
        cut, cut_loss = policy.gradient([policy.batch.select(rows) for rows in chunks(range(ROWS), size)], name, algo)
        assert whole.abs().max() > 0.01
        assert torch.allclose(cut, whole, atol=1e-5)
        assert cut_loss == pytest.approx(loss, abs=1e-5)


@every_objective
@every_mode
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_give_the_gradient_of_the_whole_even_one_without_a_token(name: str, mode: str, ranks: int) -> None:
    algo = AlgoConfig(**ALL_TERMS, loss_aggregation=mode)
    for seed in range(3):
        policy = Policy(seed)
        batch, speaking = policy.batch, policy.batch.mask.any(dim=1)
        whole, _ = policy.gradient([batch], name, algo)
        silent_rows = (~speaking).nonzero().squeeze(1).tolist()
        assert silent_rows  # row 4 has an empty response
        spoken = speaking.nonzero().squeeze(1).tolist()
        shares = [silent_rows, *[spoken[n :: max(ranks - 1, 1)] for n in range(max(ranks - 1, 1))]]
        total = torch.zeros_like(whole)
        for rows in shares if ranks > 1 else [list(range(ROWS))]:
            rank = batch.select(rows)
            parts = [*(rank.select(part).trim() for part in chunks(range(len(rank)), 2)), rank.blank()]
            gradient, loss = policy.gradient(parts, name, algo)
            assert math.isfinite(loss)
            total += gradient
        assert torch.allclose(total, whole, atol=1e-5)


@every_objective
@every_mode
@pytest.mark.parametrize("seed", range(5))
def test_order_of_rows_does_not_matter(name: str, mode: str, seed: int) -> None:
    algo, policy = AlgoConfig(**ALL_TERMS, loss_aggregation=mode), Policy(seed)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    whole, loss = policy.gradient([policy.batch], name, algo)
    moved, moved_loss = policy.gradient([policy.batch.select(order)], name, algo)
    assert torch.allclose(moved, whole, atol=1e-5)
    assert moved_loss == pytest.approx(loss, abs=1e-5)


def leaves(batch: TrainBatch, logprobs: Tensor, entropy: Tensor, name: str, algo: AlgoConfig) -> tuple[LossOutput, Tensor]:
    """(output, stacked gradients of log-probs and entropies)."""
    both = torch.stack([logprobs, entropy]).requires_grad_()
    output = policy_objective(both[0], both[1], batch, POLICY_LOSSES[name].loss, algo, LONGEST)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert both.grad is not None
    return output, both.grad


def is_finite(output: LossOutput, gradient: Tensor) -> bool:
    numbers = [output.loss, *(part for pair in output.metrics.values() for part in pair), *output.maxima.values()]
    return bool(gradient.isfinite().all()) and all(bool(number.isfinite()) for number in numbers)


@every_objective
@every_mode
@pytest.mark.parametrize("bad", BAD)
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(name: str, mode: str, bad: float) -> None:
    algo = AlgoConfig(**ALL_TERMS, loss_aggregation=mode)
    for seed in range(2):
        plain, gradient = leaves(*train_case(seed, 0.0), name, algo)
        found, found_gradient = leaves(*train_case(seed, bad), name, algo)
        assert is_finite(plain, gradient)
        assert torch.equal(found_gradient, gradient)
        assert not found_gradient[:, ~train_case(seed)[0].mask].any()
        assert found.loss.item() == plain.loss.item()
        assert found.metrics == plain.metrics
        assert found.maxima == plain.maxima


def far_out(new: float, old: float, ref: float, advantage: float) -> tuple[TrainBatch, Tensor]:
    """(batch, new log-probs); rows with extreme log-ratios on all tokens, on one of three tokens, and on none."""
    far = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)

    def of(value: float) -> Tensor:
        return torch.where(far, value, -1.0)

    mask = torch.tensor([[False, True, True, True]] * 3)
    batch = TrainBatch(
        batch_of(mask),
        old_logprobs=of(old),
        advantages=torch.full((3, 4), advantage),
        ref_logprobs=of(ref),
        weights=torch.ones(3, 4),
        positive=torch.ones(3, dtype=torch.bool),
    )
    return batch.as_minibatch(), of(new)


EXTREMES = (-1e3, -1.0, -math.inf)


@every_objective
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("gradient", [None, "k1", "k2", "k3", "abs"])
def test_log_ratios_far_out_leave_values_and_gradients_finite(
    name: str, advantage: float, dual_clip: float | None, gradient: str | None
) -> None:
    terms = {**ALL_TERMS, "dual_clip": dual_clip, "kl_loss_gradient": gradient}
    for new in EXTREMES:
        for old in EXTREMES:
            for ref in EXTREMES:
                batch, logprobs = far_out(new, old, ref, advantage)
                output, slopes = leaves(batch, logprobs, torch.ones(3, 4), name, AlgoConfig(**terms))
                assert is_finite(output, slopes), (new, old, ref)


@every_objective
def test_a_row_far_out_leaves_the_gradient_of_the_others_alone(name: str) -> None:
    tame, far = far_out(-1.0, -1.0, -1.0, 1.0), far_out(-math.inf, -1.0, -1.0, 1.0)
    expected, found = (leaves(*case, torch.ones(3, 4), name, AlgoConfig(**ALL_TERMS))[1] for case in (tame, far))
    assert expected[0, 2, 1:].all()
    assert torch.equal(found[:, 2], expected[:, 2])


@every_objective
@every_mode
@pytest.mark.parametrize("bad", BAD)
def test_a_batch_without_a_token_has_loss_and_gradient_zero(name: str, mode: str, bad: float) -> None:
    batch, _, _ = train_case(0)
    nothing = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    silent = replace(batch, rollout=replace(batch.rollout, response_mask=nothing)).as_minibatch()
    assert (silent.num_tokens, silent.num_sequences, silent.num_positive_tokens) == (0, 0, 0)
    whatever = torch.full((ROWS, WIDTH), bad)
    output, gradient = leaves(silent, whatever, whatever, name, AlgoConfig(**ALL_TERMS, loss_aggregation=mode))
    assert is_finite(output, gradient)
    assert output.loss.item() == 0
    assert not gradient.any()
