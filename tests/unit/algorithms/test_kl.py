"""KL estimators: values, gradients, expected gradients, and extreme inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.platform.algorithms.kl import CAP, KL_ESTIMATORS, KLController, kl


def of(estimator: str, log_ratio: float) -> tuple[float, float]:
    """(value, derivative with respect to logp) at logp = log_ratio, ref = 0."""
    logp = torch.tensor([log_ratio], requires_grad=True)
    value = kl(logp, torch.zeros(1), estimator)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    return value.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("log_ratio", "k1", "k2", "k3"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (0.5, 0.5, 0.125, 0.106531),
        (-0.5, -0.5, 0.125, 0.148721),
        (2.0, 2.0, 2.0, 1.135335),
        (-2.0, -2.0, 2.0, 4.389056),
    ],
)
def test_values(log_ratio: float, k1: float, k2: float, k3: float) -> None:
    found = [of(name, log_ratio)[0] for name in ("k1", "k2", "k3")]
    assert np.allclose(found, [k1, k2, k3], atol=1e-6)


def test_k3_of_a_small_log_ratio_keeps_its_digits() -> None:
    assert of("k3", 0.01)[0] == pytest.approx(4.98337e-5, rel=2e-4)
    assert of("k3", 1e-4)[0] >= 0


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("k2", 0.5), ("k3", 0.393469)])
def test_derivatives_at_one_half(estimator: str, slope: float) -> None:
    assert of(estimator, 0.5)[1] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k2", [0.320702, -0.082466, -0.238236]),  # grad KL(p || q)
        ("k1", [0.0, 0.0, 0.0]),
        ("k3", [0.3, 0.0, -0.3]),  # grad KL(q || p) = p - q
    ],
)
def test_expected_gradient_as_a_loss(estimator: str, expected: list[float]) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    logits = p.log().requires_grad_()
    estimates = kl(logits.log_softmax(dim=-1), q.log(), estimator)
    (p * estimates).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert np.allclose(logits.grad, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k3_far_below_the_reference_is_capped_with_no_gradient(dtype: torch.dtype) -> None:
    logp = torch.tensor([-120.0], dtype=dtype, requires_grad=True)
    value = kl(logp, torch.tensor([-1.0], dtype=dtype), "k3")
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert value.dtype == torch.float32
    assert value.item() == CAP == 10.0
    assert logp.grad is not None
    assert logp.grad.item() == 0.0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-math.inf, -1e30, -1e3, 1e3, 1e30])
def test_values_and_gradients_far_out_are_finite(estimator: str, log_ratio: float) -> None:
    value, slope = of(estimator, log_ratio)
    assert abs(value) <= CAP + 1e-5
    assert math.isfinite(slope)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_impossible_under_the_reference_only(estimator: str) -> None:
    logp = torch.tensor([-1.0], requires_grad=True)
    value = kl(logp, torch.tensor([-math.inf]), estimator)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert value.item() == pytest.approx(CAP)
    assert logp.grad is not None
    assert math.isfinite(logp.grad.item())


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_impossible_under_both_is_no_difference(estimator: str) -> None:
    value, slope = of(estimator, 0.0)
    both = kl(torch.tensor([-math.inf]), torch.tensor([-math.inf]), estimator)
    assert both.item() == value == 0.0
    assert math.isfinite(slope)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_nan_is_not_hidden(estimator: str) -> None:
    assert math.isnan(of(estimator, math.nan)[0])


def test_k2_and_k3_are_never_negative() -> None:
    log_ratios = torch.linspace(-12, 12, 4001)
    for estimator in ("k2", "k3"):
        assert (kl(log_ratios, torch.zeros_like(log_ratios), estimator) >= 0).all()


def test_shapes_must_agree() -> None:
    shapes: tuple[Tensor, Tensor] = (torch.zeros(2), torch.zeros(3))
    with pytest.raises(AssertionError, match=r"\(2,\) and \(3,\)"):
        kl(*shapes, "k1")


@pytest.mark.parametrize(
    ("kl_per_token", "samples", "coef"),
    [
        (0.02, 1000, 0.5),  # on target
        (0.021, 1000, 0.5 * 1.005),  # 5 % above: 1 + .05 x .1
        (0.018, 1000, 0.5 * 0.99),  # 10 % below: 1 - .1 x .1
        (0.5, 1000, 0.5 * 1.02),  # far above, held at 20 %
        (0.0, 1000, 0.5 * 0.98),
        (-0.3, 1000, 0.5 * 0.98),  # k1 may be negative
        (0.5, 10_000, 0.5 * 1.2),
        (0.5, 90_000, 0.5 * 1.2),  # never by more than 20 % at once
        (0.0, 90_000, 0.5 * 0.8),
    ],
)
def test_controller_steers_towards_its_target(kl_per_token: float, samples: int, coef: float) -> None:
    controller = KLController(0.5, 0.02, 10_000)
    controller.observe(kl_per_token, samples)
    assert controller.coef == pytest.approx(coef)


def test_controller_compounds() -> None:
    controller = KLController(1.0, 1.0, 10)
    for kl_per_token in (2.0, 2.0, 0.0):  # 1.2 x 1.2 x .8
        controller.observe(kl_per_token, 10)
    assert controller.coef == pytest.approx(1.152)


def test_controller_without_a_target_is_fixed() -> None:
    controller = KLController(0.5, None, 10)
    controller.observe(100.0, 10)
    assert controller.coef == 0.5
