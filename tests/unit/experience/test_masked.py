"""Masked sums, means and whitening."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.platform.experience.masked import masked_fill_zero, masked_mean, masked_sum, whiten

VALUES = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("bad", [50.0, math.nan, math.inf, -math.inf])
def test_sum_and_mean_read_only_what_is_selected(bad: float) -> None:
    values = torch.where(MASK, VALUES, torch.tensor(bad))
    assert masked_fill_zero(values, MASK).tolist() == [[1, 2, 0], [4, 0, 0]]
    assert float(masked_sum(values, MASK)) == 7
    assert float(masked_mean(values, MASK)) == pytest.approx(7 / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_outside_the_mask_is_zero(bad: float) -> None:
    values = torch.where(MASK, VALUES, torch.tensor(bad)).requires_grad_()
    masked_mean(values, MASK).backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert torch.allclose(values.grad, MASK / 3)


def test_mean_of_nothing_is_zero() -> None:
    assert float(masked_mean(VALUES, torch.zeros_like(MASK))) == 0
    assert float(masked_sum(VALUES, torch.zeros_like(MASK))) == 0


def test_mean_of_filler_in_padding() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, 1.0, 1.0]])
    assert float(masked_mean(-logprobs, torch.tensor([[1, 1, 0, 0]], dtype=torch.bool))) == 1.5


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"values \(2, 3\) but mask \(3,\)"):
        masked_fill_zero(VALUES, MASK[0])


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_whiten_two_values(bad: float) -> None:
    whitened = whiten(torch.tensor([[0.95, 1.0, bad]]), torch.tensor([[1, 1, 0]], dtype=torch.bool))
    # deviations -+.025, std .0353553
    assert np.allclose(whitened, [[-0.707087, 0.707087, 0]], atol=1e-6)


@pytest.mark.parametrize(("mask", "expected"), [([1, 0], [3.0, 0.0]), ([0, 0], [0.0, 0.0])])
def test_whiten_of_one_value_or_none(mask: list[int], expected: list[float]) -> None:
    whitened = whiten(torch.tensor([[3.0, 5.0]]), torch.tensor([mask], dtype=torch.bool))
    assert whitened.tolist() == [expected]


def test_whiten_of_equal_values_is_zero() -> None:
    whitened = whiten(torch.full((1, 8), 0.35), torch.ones(1, 8, dtype=torch.bool))
    assert whitened.abs().max() < 1e-6


def test_whiten_adds_eps_to_the_deviation() -> None:
    whitened = whiten(torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool), eps=1.0)
    assert np.allclose(whitened, [[-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)]])


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), offset=st.sampled_from([0.0, 1e4]))
def test_whiten_equals_the_reference(values: list[float], offset: float) -> None:
    shifted = np.array(values, dtype=np.float32) + np.float32(offset)
    exact = shifted.astype(np.float64)
    expected = (exact - exact.mean()) / (exact.std(ddof=1) + 1e-6)
    found = whiten(torch.tensor(shifted[None]), torch.ones(1, len(values), dtype=torch.bool))[0]
    assert np.allclose(found, expected, atol=1e-4)
