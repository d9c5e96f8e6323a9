"""Log-probs and entropies from logits: the shift by one token, the temperature, and impossible tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.platform.algorithms.logprobs import entropy, log_ratio, token_entropy, token_logprobs

INF = math.inf


def test_logits_at_t_minus_one_speak_of_token_t() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [7.0, 7.0, 7.0]]])
    found = token_logprobs(logits, torch.tensor([[2, 0, 1]]), 1.0)
    # log-softmax of (2, 1, 0) at 0 is -.407606; of three equal logits -1.098612
    assert np.allclose(found, [[0, -0.407606, -1.098612]], atol=1e-6)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, [-0.142932, -2.142932, -4.142932]), (1.0, [-0.407606, -1.407606, -2.407606])],
)
def test_temperature_divides_the_logits(temperature: float, expected: list[float]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(3, 2, 3)
    tokens = torch.tensor([[0, 0], [0, 1], [0, 2]])
    assert np.allclose(token_logprobs(logits, tokens, temperature)[:, 1], expected, atol=1e-6)


def test_temperature_of_the_entropy() -> None:
    # p = softmax(4, 2, 0) = (.866813, .117310, .015876): H = .123896 + .251391 + .065773
    found = token_entropy(torch.tensor([[[2.0, 1.0, 0.0], [5.0, 5.0, 5.0]]]), 0.5)
    assert np.allclose(found, [[0, 0.441060]], atol=1e-5)


def test_sixteen_bit_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0], [0, 0, 0]]], dtype=torch.bfloat16)
    found = token_logprobs(logits, torch.tensor([[0, 0]]), 1.0)
    assert found.dtype == torch.float32
    assert found[0, 1].item() == pytest.approx(-0.407606, abs=1e-6)


@pytest.mark.parametrize("filler", [-1, -100, 0, 2, 10_000])
def test_padding_may_hold_any_id(filler: int) -> None:
    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    found = token_logprobs(logits, torch.tensor([[0, 1, filler, filler]]), 1.0)
    plain = token_logprobs(logits, torch.tensor([[0, 1, 0, 0]]), 1.0)
    assert torch.equal(found[:, :2], plain[:, :2])
    assert found.isfinite().all()


def test_single_token_has_nothing_before_it() -> None:
    assert token_logprobs(torch.randn(2, 1, 3), torch.zeros(2, 1, dtype=torch.int64), 1.0).tolist() == [[0], [0]]
    assert token_entropy(torch.randn(2, 1, 3), 1.0).tolist() == [[0], [0]]


def test_logits_and_tokens_must_agree() -> None:
    with pytest.raises(AssertionError, match="but tokens"):
        token_logprobs(torch.zeros(1, 3, 5), torch.zeros(1, 2, dtype=torch.int64), 1.0)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (torch.tensor([0.0, -INF]), 0.0),
        (torch.tensor([0.0, 0.0, -INF]), 0.693147),
        (torch.tensor([65504.0, -65504.0], dtype=torch.float16), 0.0),
        (torch.tensor([1e3, -1e3, 0.0]), 0.0),
        (torch.tensor([0.0, 0.0, 0.0, 0.0]), 1.386294),
    ],
)
def test_entropy_of_impossible_tokens(logits: Tensor, expected: float) -> None:
    variable = logits.clone().requires_grad_()
    found = entropy(variable)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(expected, abs=1e-6)
    assert variable.grad is not None
    assert variable.grad.abs().max() < 1e-6


def test_entropy_gradient() -> None:
    # dH/dz_i = -p_i (log p_i + H); p = (.75, .25): H = .562335
    logits = torch.tensor([math.log(3.0), 0.0, -INF]).requires_grad_()
    entropy(logits).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    expected = [-0.75 * (math.log(0.75) + 0.562335), -0.25 * (math.log(0.25) + 0.562335), 0.0]
    assert np.allclose(logits.grad, expected, atol=1e-6)


def test_entropy_is_never_negative() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)) * 40
    assert (entropy(logits) >= 0).all()


def test_logprob_gradient_with_impossible_tokens_is_finite() -> None:
    logits = torch.tensor([[[0.0, -INF, 1.0], [-INF, 0.0, 0.0]]]).requires_grad_()
    token_logprobs(logits, torch.tensor([[0, 0]]), 1.0).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    p = 1 / (1 + math.e)  # of token 0 among (0, 1)
    assert torch.allclose(logits.grad, torch.tensor([[[1 - p, 0, p - 1], [0, 0, 0]]]), atol=1e-6)


def test_log_ratio_of_impossible_tokens() -> None:
    found = log_ratio(torch.tensor([-1.0, -INF, -INF, -1.0]), torch.tensor([-3.0, -INF, -1.0, -INF]))
    assert found[:2].tolist() == [2.0, 0.0]
    assert found.isfinite().all()
    assert found[2] < -1e9 < 1e9 < found[3]
