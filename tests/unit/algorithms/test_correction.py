"""Importance weights of trainer against sampler: bounds, masks and metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.platform.algorithms.correction import Correction, correct, importance_weights
from tandem.platform.config.algo import AlgoConfig

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
# rho of each token: row 0: 4, 1, 1/4; row 1: 2, 2. Of the responses: 1; 4
RHO = [[math.nan, 4, 1, 0, 0.25], [math.inf, 2, 2, -7, 0], [9, 9, 9, 9, 9]]


def log_probs() -> tuple[Tensor, Tensor]:
    """(trainer's, sampler's), whose ratios are RHO; NaN where RHO has no logarithm."""
    return torch.tensor(RHO).log() - 3, torch.full((3, 5), -3.0)


def corrected(level: str, mode: str, **numbers: Any) -> Correction:
    return correct(*log_probs(), MASK, AlgoConfig(correction=mode, correction_level=level, **numbers))


def allclose(found: Tensor, expected: list[list[float]]) -> bool:
    return bool(np.allclose(found, expected, atol=1e-5))


def test_importance_weights_of_tokens() -> None:
    found = importance_weights(*log_probs(), MASK, "token")
    assert allclose(found, [[0, 4, 1, 0, 0.25], [0, 2, 2, 0, 0], [0, 0, 0, 0, 0]])


def test_importance_weights_of_responses() -> None:
    found = importance_weights(*log_probs(), MASK, "sequence")
    assert allclose(found, [[0, 1, 1, 0, 1], [0, 4, 4, 0, 0], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("old", "sampler"), [(-1.0, -math.inf), (-1.0, -1e3), (-math.inf, -1.0), (-1e3, -1.0)])
def test_importance_weights_far_out_are_finite(level: str, old: float, sampler: float) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    found = importance_weights(torch.full((1, 3), old), torch.full((1, 3), sampler), mask, level)
    assert np.allclose(found, math.exp(20) if old > sampler else math.exp(-20), rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_impossible_for_both_weighs_one(level: str) -> None:
    never = torch.full((1, 2), -math.inf)
    assert importance_weights(never, never, torch.ones(1, 2, dtype=torch.bool), level).tolist() == [[1, 1]]


def test_truncated_weights_of_tokens() -> None:
    found = corrected("token", "truncate", correction_max=3.0)
    assert allclose(found.weights, [[0, 3, 1, 0, 0.25], [0, 2, 2, 0, 0], [0, 0, 0, 0, 0]])
    assert torch.equal(found.mask, MASK)
    # sum 8.25, squares 9 + 1 + .0625 + 4 + 4 = 18.0625: 68.0625 / (5 x 18.0625)
    expected = {"mean": 9.25 / 5, "max": 4, "ess_frac": 0.753633, "masked_frac": 0}
    assert found.metrics == pytest.approx({f"correction/{name}": value for name, value in expected.items()}, abs=1e-5)


def test_masked_weights_of_tokens() -> None:
    found = corrected("token", "mask", correction_min=0.5, correction_max=3.0)
    assert allclose(found.weights, [[0, 0, 1, 0, 0], [0, 2, 2, 0, 0], [0, 0, 0, 0, 0]])
    assert found.mask.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 0, 0], [0] * 5]
    # weights 0, 1, 0, 2, 2: 25 / (5 x 9)
    expected = {"mean": 9.25 / 5, "max": 4, "ess_frac": 5 / 9, "masked_frac": 0.4}
    assert found.metrics == pytest.approx({f"correction/{name}": value for name, value in expected.items()}, abs=1e-5)


def test_truncated_weights_of_responses() -> None:
    found = corrected("sequence", "truncate", correction_max=3.0)
    assert allclose(found.weights, [[0, 1, 1, 0, 1], [0, 3, 3, 0, 0], [0, 0, 0, 0, 0]])
    # over the two responses with a token: rho 1 and 4, weights 1 and 3: 16 / (2 x 10)
    expected = {"mean": 2.5, "max": 4, "ess_frac": 0.8, "masked_frac": 0}
    assert found.metrics == pytest.approx({f"correction/{name}": value for name, value in expected.items()}, abs=1e-5)


def test_masked_weights_of_responses() -> None:
    found = corrected("sequence", "mask", correction_min=0.5, correction_max=3.0)
    assert allclose(found.weights, [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert found.mask.int().tolist() == [[0, 1, 1, 0, 1], [0] * 5, [0] * 5]
    expected = {"mean": 2.5, "max": 4, "ess_frac": 0.5, "masked_frac": 0.5}
    assert found.metrics == pytest.approx({f"correction/{name}": value for name, value in expected.items()}, abs=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_bounds_themselves_are_in_range(level: str) -> None:
    same, mask = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    algo = AlgoConfig(correction="mask", correction_level=level, correction_min=1.0, correction_max=1.0)
    found = correct(same, same, mask, algo)
    assert found.mask.all()
    assert found.metrics["correction/ess_frac"] == 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_in_range_and_nothing_at_all(level: str) -> None:
    none = corrected(level, "mask", correction_min=100.0, correction_max=200.0)
    assert not none.mask.any()
    assert not none.weights.any()
    assert none.metrics["correction/ess_frac"] == 0
    assert none.metrics["correction/masked_frac"] == 1
    empty = correct(*log_probs(), torch.zeros_like(MASK), AlgoConfig(correction="mask", correction_level=level))
    assert empty.metrics == {}
    assert not empty.weights.any()
