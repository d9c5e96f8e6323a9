"""Policy and value losses, and the aggregation of token losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tandem.platform.algorithms.losses import (
    AGGREGATIONS,
    aggregate,
    clipped_surrogate,
    clipped_value_loss,
    clipped_weight,
    importance_ratio,
    log_likelihood_loss,
    sequence_ratio,
)


def surrogate(
    advantage: float, ratio: float, low: float = 0.2, high: float = 0.28, dual_clip: float | None = 3.0
) -> tuple[float, float, bool]:
    """(loss, its derivative with respect to the ratio, whether the clip decided)."""
    variable = torch.tensor([[float(ratio)]], requires_grad=True)
    losses, clipped = clipped_surrogate(
        variable, torch.tensor([[float(advantage)]]), clip_low=low, clip_high=high, dual_clip=dual_clip
    )
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert variable.grad is not None
    return losses.item(), variable.grad.item(), bool(clipped.item())


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1, 5, -1.28, 0),
        (1, 1.25, -1.25, -1),
        (1, 1.3, -1.28, 0),
        (1, 0.5, -0.5, -1),
        (-1, 5, 3.0, 0),
        (-1, 2.5, 2.5, 1),
        (-1, 1.25, 1.25, 1),
        (-1, 0.5, 0.8, 0),
        (-1, 0.9, 0.9, 1),
        (0, 5, 0, 0),
        (2, 1, -2, -2),
    ],
)
def test_clipped_surrogate(advantage: float, ratio: float, loss: float, slope: float) -> None:
    found, gradient, clipped = surrogate(advantage, ratio)
    assert found == pytest.approx(loss, abs=1e-6)
    assert gradient == pytest.approx(slope, abs=1e-6)
    assert clipped == (slope == 0 and advantage != 0)


@pytest.mark.parametrize("ratio", [5, 1.25, 1.3])
def test_symmetric_clip(ratio: float) -> None:
    assert surrogate(1, ratio, high=0.2)[0] == pytest.approx(-1.2, abs=1e-6)


def test_without_dual_clip_a_negative_advantage_is_unbounded() -> None:
    assert surrogate(-1, 5, dual_clip=None) == (5.0, 1.0, False)


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    # 3 x A would be -3, lower than the clipped -1.28
    assert surrogate(1, 5, dual_clip=3.0)[0] == pytest.approx(-1.28, abs=1e-6)


def test_clipped_surrogate_refuses_shapes_that_differ() -> None:
    with pytest.raises(AssertionError, match=r"ratio \(1, 2\) but advantages \(1, 1\)"):
        clipped_surrogate(torch.ones(1, 2), torch.ones(1, 1), clip_low=0.2, clip_high=0.2, dual_clip=None)


def ratio_of(new: float, old: float) -> tuple[float, float]:
    """(ratio, its derivative with respect to the new log-prob)."""
    logprobs = torch.tensor([[new]], requires_grad=True)
    ratio = importance_ratio(logprobs, torch.tensor([[old]]), torch.ones(1, 1, dtype=torch.bool))
    ratio.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return ratio.item(), logprobs.grad.item()


def test_ratio() -> None:
    # exp(-1.5 + 1) = .606531, which is also its derivative
    assert ratio_of(-1.5, -1.0) == pytest.approx((0.606531, 0.606531), abs=1e-6)
    assert ratio_of(-2.0, -2.0) == (1.0, 1.0)


@pytest.mark.parametrize(("new", "old"), [(-1e3, -1.0), (-1.0, -1e3), (-math.inf, -1.0), (-1.0, -math.inf)])
def test_ratio_far_out_is_finite_with_no_gradient(new: float, old: float) -> None:
    ratio, slope = ratio_of(new, old)
    assert math.exp(-20) * 0.99 <= ratio <= math.exp(20) * 1.01
    assert slope == 0.0


def test_ratio_of_two_impossible_tokens_is_one() -> None:
    assert ratio_of(-math.inf, -math.inf) == (1.0, 0.0)


def test_ratio_does_not_hide_nan() -> None:
    assert math.isnan(ratio_of(math.nan, -1.0)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ratio_outside_the_mask_is_one(bad: float) -> None:
    new, old = torch.tensor([[-1.0, bad]], requires_grad=True), torch.tensor([[-1.0, bad]])
    ratio = importance_ratio(new, old, torch.tensor([[True, False]]))
    ratio.sum().backward()  # type: ignore[no-untyped-call]
    assert ratio.tolist() == [[1.0, 1.0]]
    assert new.grad is not None
    assert new.grad.tolist() == [[1.0, 0.0]]


def value_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    values = torch.tensor([[value]], requires_grad=True)
    losses, clipped = clipped_value_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), value_clip=clip)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    return losses.item(), values.grad.item(), bool(clipped.item())


@pytest.mark.parametrize(
    ("target", "clip", "loss", "slope", "clipped"),
    [
        (2.0, 0.2, 0.32, 0.0, True),  # max(.25, (1.2 - 2)^2) / 2
        (1.0, 0.2, 0.125, 0.5, False),  # max(.25, .04) / 2
        (2.0, None, 0.125, -0.5, False),
    ],
)
def test_value_loss(target: float, clip: float | None, loss: float, slope: float, clipped: bool) -> None:
    found = value_loss(1.5, 1.0, target, clip)
    assert found[:2] == pytest.approx((loss, slope), abs=1e-6)
    assert found[2] == clipped


def test_value_that_moved_less_than_the_clip_never_counts_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    old, values = 0.19 * torch.rand(2, 100, 100, generator=generator) - 0.095  # sums of these round
    returns = torch.randn(100, 100, generator=generator)
    losses, clipped = clipped_value_loss(values, old, returns, value_clip=0.2)
    assert not clipped.any()
    assert torch.allclose(losses, (values - returns).square() / 2, atol=1e-5)


def test_value_loss_refuses_shapes_that_differ() -> None:
    with pytest.raises(AssertionError, match="differ in shape"):
        clipped_value_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 1), value_clip=None)


TWO_ROWS = torch.tensor([[1.0, 1, 1, 1], [3, 3, 99, 99]])
TWO_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
MODES = [
    ("token-mean", 10 / 6),
    ("seq-mean-token-mean", 2.0),
    ("seq-mean-token-sum", 5.0),
    ("seq-mean-token-sum-norm", 0.625),  # 10 / (2 x 8)
]


def total(losses: Tensor, mask: Tensor, mode: str, tokens: int, sequences: int) -> float:
    return aggregate(losses, mask, mode, num_tokens=tokens, num_sequences=sequences, max_tokens=8).item()


def test_the_mode_table_is_complete() -> None:
    assert [mode for mode, _ in MODES] == list(AGGREGATIONS)


@pytest.mark.parametrize(("mode", "expected"), MODES)
@pytest.mark.parametrize("bad", [99.0, math.nan, math.inf])
def test_aggregation(mode: str, expected: float, bad: float) -> None:
    losses = torch.where(TWO_MASK, TWO_ROWS, torch.tensor(bad))
    assert total(losses, TWO_MASK, mode, 6, 2) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("mode", "expected"), MODES)
def test_parts_add_up_to_the_whole(mode: str, expected: float) -> None:
    parts = [total(TWO_ROWS[i : i + 1], TWO_MASK[i : i + 1], mode, 6, 2) for i in range(2)]
    assert sum(parts) == pytest.approx(expected, abs=1e-6)


def test_token_mean_over_micro_batches_and_ranks() -> None:
    def part(tokens: int, loss: float, count: int) -> float:
        return total(torch.full((1, tokens), loss), torch.ones(1, tokens, dtype=torch.bool), "token-mean", count, 1)

    assert part(1, 4.0, 10) + part(9, 1.0, 10) == pytest.approx(1.3)
    assert part(1, 4.0, 40) + part(9, 1.0, 40) + part(30, 0.5, 40) == pytest.approx(0.7)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_out_row_counts_in_neither_part_of_the_fraction(mode: str) -> None:
    losses = torch.tensor([[1.0, 1, 1, 1, 0, 0], [5.0] * 6])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0] * 6], dtype=torch.bool)
    alone = total(losses[:1], mask[:1], mode, 4, 1)
    assert total(losses, mask, mode, 4, 1) == pytest.approx(alone)
    assert alone == pytest.approx({"token-mean": 1.0, "seq-mean-token-mean": 1.0, "seq-mean-token-sum": 4.0}.get(mode, 0.5))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_learn_from_is_zero_with_zero_gradient(mode: str) -> None:
    losses = torch.full((2, 3), math.nan, requires_grad=True)
    loss = aggregate(losses, torch.zeros(2, 3, dtype=torch.bool), mode, num_tokens=0, num_sequences=0, max_tokens=8)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert losses.grad is not None
    assert not losses.grad.any()


def test_aggregate_refuses_shapes_that_differ() -> None:
    with pytest.raises(AssertionError, match="but mask"):
        total(torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool), "token-mean", 1, 1)


def test_sequence_ratio_is_the_geometric_mean_with_each_tokens_own_gradient() -> None:
    # ratios 8, 1, 1 around a gap: s = 2. A row of ratios 1/4 and 1: s = 1/2. An empty row
    ratios = torch.tensor([[math.nan, 8, 99, 1, 1], [7, 0.25, 1, math.nan, 0], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 1, 1, 0, 0], [0] * 5], dtype=torch.bool)
    logprobs = (ratios.log() - 1).requires_grad_()
    found = sequence_ratio(logprobs, torch.full((3, 5), -1.0), mask)
    assert torch.allclose(found, torch.tensor([[1, 2, 1, 2, 2], [1, 0.5, 0.5, 1, 1], [1] * 5]))
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([[0, 2, 0, 2, 2], [0, 0.5, 0.5, 0, 0], [0.0] * 5]))


@pytest.mark.parametrize(("new", "old"), [(-1e3, -1.0), (-1.0, -1e3), (-math.inf, -1.0), (-1.0, -math.inf)])
def test_sequence_ratio_far_out_is_finite(new: float, old: float) -> None:
    logprobs = torch.tensor([[new, -1.0]], requires_grad=True)
    found = sequence_ratio(logprobs, torch.tensor([[old, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    found.sum().backward()  # type: ignore[no-untyped-call]
    bound = math.exp(20 if new > old else -20)
    assert found.tolist() == [[pytest.approx(bound, rel=1e-5)] * 2]
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_clipped_weight() -> None:
    # weights 1.28 (of 5), .8 (of .1), 1: losses -1.28 x 2 x -1, -.8 x -1 x -2, -1 x 3 x -.5
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    ratio, advantages = torch.tensor([[5, 0.1, 1]], requires_grad=True), torch.tensor([[2.0, -1, 3]])
    losses, clipped = clipped_weight(logprobs, ratio, advantages, clip_low=0.2, clip_high=0.28)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(losses, torch.tensor([[2.56, -1.6, 1.5]]))
    assert clipped.tolist() == [[True, True, False]]
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.tensor([[-2.56, 0.8, -3]]))
    assert ratio.grad is None  # the weight is a constant


def test_log_likelihood_loss() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -math.inf, -math.inf]], requires_grad=True)
    losses = log_likelihood_loss(logprobs, torch.tensor([[3.0, -1, 1, 0]]))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses[0, :2].tolist() == [3.0, -2.0]
    assert losses.isfinite().all()
    assert losses[0, 3].item() == 0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-3, 1, 0, 0]]
    with pytest.raises(AssertionError, match="but weights"):
        log_likelihood_loss(torch.zeros(1, 2), torch.zeros(1, 3))


def test_sequence_ratio_far_out_has_no_gradient() -> None:
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    ratio = sequence_ratio(logprobs, torch.full((1, 3), -100.0), torch.ones(1, 3, dtype=torch.bool))
    ratio.sum().backward()
    assert torch.allclose(ratio.detach(), torch.full((1, 3), math.exp(20.0)))
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
