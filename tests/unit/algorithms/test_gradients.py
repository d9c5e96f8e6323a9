"""Gradients worked out on paper: of the KL estimators in expectation, and of each objective token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from unit_batches import batch_of

from tandem.platform.algorithms.kl import KL_ESTIMATORS, kl
from tandem.platform.algorithms.objectives import policy_objective
from tandem.platform.algorithms.registry import POLICY_LOSSES
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.batch import TrainBatch

# p = (.5, .3, .2) is the policy, q = (.2, .3, .5) the reference; logits of p.
#   grad KL(p || q) = p * (log(p/q) - KL):  KL = .5 * .916291 + 0 - .2 * .916291 = .274887
#     .5 * (.916291 - .274887), .3 * -.274887, .2 * (-.916291 - .274887)
#   k1 as a loss: E[grad log p] = 0.   k3 as a loss: E[(1 - q/p) grad log p] = p - q = grad KL(q || p)
#   abs as a loss: E[sign(lr) grad log p], signs 1, 0, -1, mean .3: p * (sign - .3)
P, Q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
EXPECTED = {
    "k1": [0.0, 0.0, 0.0],
    "k2": [0.320702, -0.082466, -0.238236],
    "k3": [0.3, 0.0, -0.3],
    "abs": [0.35, -0.09, -0.26],
}
# E over p of the values: k1 and k3 are unbiased, so KL(p || q); k2: (.5 + .2) * .916291^2 / 2; abs: .7 * .916291
VALUES = {"k1": 0.274887, "k2": 0.293856, "k3": 0.274887, "abs": 0.641404}


def expectation(estimator: str, gradient: str | None = None) -> tuple[float, Tensor]:
    """(expected value over p, its gradient with respect to the logits with the samples held fixed)."""
    logits = torch.tensor(P).log().requires_grad_()
    estimates = kl(logits.log_softmax(dim=-1), torch.tensor(Q).log(), estimator, gradient)
    mean = (torch.tensor(P) * estimates).sum()
    mean.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return mean.item(), logits.grad


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_estimators_in_expectation(estimator: str) -> None:
    value, gradient = expectation(estimator)
    assert value == pytest.approx(VALUES[estimator], abs=1e-5)
    assert np.allclose(gradient, EXPECTED[estimator], atol=1e-5)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("gradient", KL_ESTIMATORS)
def test_straight_through_has_the_value_of_one_and_the_gradient_of_another(estimator: str, gradient: str) -> None:
    value, slopes = expectation(estimator, gradient)
    assert value == pytest.approx(VALUES[estimator], abs=1e-5)
    assert np.allclose(slopes, EXPECTED[gradient], atol=1e-5)


def test_the_gradient_of_k2_is_that_of_the_exact_kl() -> None:
    logits = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    logp = logits.log_softmax(dim=-1)
    (logp.exp() * (logp - torch.tensor(Q, dtype=torch.float64).log())).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert np.allclose(logits.grad, EXPECTED["k2"], atol=1e-6)


def descent(
    name: str, ratios: list[float], advantages: list[float], *, mode: str = "seq-mean-token-sum", **numbers: Any
) -> tuple[float, list[float], float]:
    """(loss, its derivatives with respect to the new log-probs, share of clipped tokens) of one response."""
    algo = AlgoConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_aggregation=mode, **numbers)
    mask = torch.tensor([[False] + [True] * len(ratios)])
    old = torch.full(mask.shape, -2.0)
    batch = TrainBatch(batch_of(mask), old, torch.tensor([[0.0, *advantages]])).as_minibatch()
    logprobs = (old + torch.tensor([[1.0, *ratios]]).log()).requires_grad_()
    output = policy_objective(logprobs, torch.zeros_like(old), batch, POLICY_LOSSES[name].loss, algo, 8)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    clipped, tokens = output.metrics["policy/clip_frac"]
    return output.loss.item(), logprobs.grad[0, 1:].tolist(), float(clipped / tokens)


# (advantage, ratio) -> loss and its slope in log-prob: -ratio * advantage, or 0 where clipped; low .2, high .28, dual 3.
SURROGATE = [
    (1, 5, -1.28, 0),
    (1, 1.25, -1.25, -1.25),
    (1, 1.3, -1.28, 0),
    (1, 0.5, -0.5, -0.5),
    (-1, 5, 3.0, 0),
    (-1, 2.5, 2.5, 2.5),
    (-1, 1.25, 1.25, 1.25),
    (-1, 0.5, 0.8, 0),
    (-1, 0.9, 0.9, 0.9),
    (0, 5, 0, 0),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "slope"), SURROGATE)
@pytest.mark.parametrize("name", ["clipped_surrogate", "gspo"])  # one token is a whole response
def test_surrogate_of_one_token(name: str, advantage: float, ratio: float, loss: float, slope: float) -> None:
    found, slopes, clipped = descent(name, [ratio], [advantage], dual_clip=3.0)
    assert found == pytest.approx(loss, abs=1e-5)
    assert slopes == pytest.approx([slope], abs=1e-5)
    assert clipped == (slope == 0 and advantage != 0)


def test_surrogate_clips_each_token_alone() -> None:
    # ratios 5, 1, .5 with advantage 1: losses -1.28, -1, -.5
    loss, slopes, clipped = descent("clipped_surrogate", [5, 1, 0.5], [1, 1, 1])
    assert loss == pytest.approx(-2.78, abs=1e-5)
    assert slopes == pytest.approx([0, -1, -0.5], abs=1e-5)
    assert clipped == pytest.approx(1 / 3)


# loss = -clip(ratio) * advantage * log-prob, with log-prob = -2 + log(ratio); slope = -clip(ratio) * advantage
CISPO = [
    (1, 5, -1.28, True),
    (1, 1.28, -1.28, False),
    (1, 1.0, -1.0, False),
    (1, 0.9, -0.9, False),
    (1, 0.1, -0.8, True),
    (-1, 5, 1.28, True),
    (-1, 0.1, 0.8, True),
    (-2, 1.0, 2.0, False),
    (0, 5, 0, True),
]


@pytest.mark.parametrize(("advantage", "ratio", "slope", "clipped"), CISPO)
def test_weight_of_cispo_saturates_and_its_gradient_never_vanishes(
    advantage: float, ratio: float, slope: float, clipped: bool
) -> None:
    loss, slopes, share = descent("cispo", [ratio], [advantage])
    assert slopes == pytest.approx([slope], abs=1e-5)
    assert loss == pytest.approx(slope * (-2 + math.log(ratio)), abs=1e-5)
    assert (slopes[0] == 0) == (advantage == 0)
    if ratio != 1.28:  # on the bound, rounding decides what to call it
        assert share == clipped


def test_cispo_keeps_every_token_of_a_response_where_the_surrogate_drops_some() -> None:
    ratios, advantages = [5.0, 1.0, 0.5, 2.0], [1.0, 1.0, -1.0, 2.0]
    assert descent("cispo", ratios, advantages)[1] == pytest.approx([-1.28, -1, 0.8, -2.56], abs=1e-5)
    assert descent("clipped_surrogate", ratios, advantages)[1] == pytest.approx([0, -1, 0, 0], abs=1e-5)


def test_policy_gradient_is_minus_the_advantage_whatever_the_ratio() -> None:
    loss, slopes, clipped = descent("policy_gradient", [5, 1, 0.1], [1, -2, 3])
    assert slopes == pytest.approx([-1, 2, -3], abs=1e-6)
    # log-probs -2 + log 5, -2, -2 + log .1: -(-.390562) + 2 * -2 - 3 * -4.302585
    assert loss == pytest.approx(0.390562 - 4 + 12.907755, abs=1e-4)
    assert clipped == 0


def test_gspo_clips_a_response_as_a_whole() -> None:
    # s = (8 * .5 * 1)^(1/3) = 1.587401, above 1.28: every token is clipped, the ones below the bound too
    loss, slopes, clipped = descent("gspo", [8, 0.5, 1], [1, 1, 1])
    assert loss == pytest.approx(-3 * 1.28, abs=1e-5)
    assert slopes == [0, 0, 0]
    assert clipped == 1
    # s = (8 * .125 * 1)^(1/3) = 1: no token is clipped, the ones far out neither
    loss, slopes, clipped = descent("gspo", [8, 0.125, 1], [1, 1, 1])
    assert loss == pytest.approx(-3, abs=1e-5)
    assert slopes == pytest.approx([-1, -1, -1], abs=1e-5)
    assert clipped == 0


def test_gspo_gives_each_token_the_ratio_of_the_response_and_its_own_advantage() -> None:
    # s = (2 * .5 * 1.1)^(1/3) = 1.032280
    slopes = descent("gspo", [2, 0.5, 1.1], [1, -2, 3])[1]
    assert slopes == pytest.approx([-1.032280, 2.064560, -3.096840], abs=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.5])
@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 3.0])
def test_gspo_has_the_gradient_of_the_sequence_level_form(advantage: float, scale: float) -> None:
    """GSPO eq. 5: -min(s A, clip(s) A) with s = exp(mean log-ratio), differentiated through s."""
    for seed in range(5):
        log_ratios = (scale * torch.randn(6, generator=torch.Generator().manual_seed(seed))).double().requires_grad_()
        s = log_ratios.mean().exp()
        loss = -torch.minimum(s * advantage, s.clamp(0.8, 1.28) * advantage)
        loss.backward()  # type: ignore[no-untyped-call]
        assert log_ratios.grad is not None
        ratios = log_ratios.detach().exp().tolist()
        found, slopes, _ = descent("gspo", ratios, [advantage] * 6, mode="seq-mean-token-mean")
        assert found == pytest.approx(loss.item(), abs=1e-4)
        assert slopes == pytest.approx(log_ratios.grad.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_objective_has_the_gradient_of_the_policy_gradient(name: str) -> None:
    _, slopes, clipped = descent(name, [1, 1, 1], [1.5, -2, 0], dual_clip=3.0)
    assert slopes == pytest.approx([-1.5, 2, 0], abs=1e-6)
    assert clipped == 0


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize(("advantage", "sign"), [(1.0, -1), (-1.0, 1)])
def test_descent_raises_what_was_good_and_lowers_what_was_bad(name: str, advantage: float, sign: int) -> None:
    for ratio in (0.5, 0.9, 1.0, 1.1, 2.0):
        (slope,) = descent(name, [ratio], [advantage])[1]
        assert slope * sign >= 0
    assert descent(name, [1.0], [advantage])[1] == pytest.approx([sign])
