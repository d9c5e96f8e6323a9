"""Every estimator and every objective against a float64 reference written from the papers, on random batches with gaps,
empty responses, unscored samples, uneven groups, and NaN poison in all values that must not be read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import reference_losses
import torch
from algo_cases import BAD, LONGEST, ROWS, SETTINGS, VARIANTS, WIDTH, random_case, rows_of, samples_of, train_case
from torch import Tensor

from tandem.platform.algorithms.correction import correct
from tandem.platform.algorithms.credit import credit
from tandem.platform.algorithms.kl import KL_ESTIMATORS, kl
from tandem.platform.algorithms.losses import AGGREGATIONS, aggregate
from tandem.platform.algorithms.objectives import policy_objective, value_objective
from tandem.platform.algorithms.registry import ESTIMATORS, POLICY_LOSSES, resolve
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.rewards.shaping import overlong_penalty

# Settings around every estimator: KL in the reward, masks, correction.
AROUND: list[dict[str, Any]] = [
    {},
    {"kl_reward_coef": 0.1, "kl_reward_estimator": "k3"},
    {"kl_reward_coef": 0.5, "overlong_filter": True, "correction": "truncate"},
    {"correction": "mask", "correction_min": 0.7, "correction_max": 1.4},
    {"kl_reward_coef": 0.2, "correction": "mask", "correction_level": "sequence", "correction_max": 3.0},
]


def test_the_reference_has_every_estimator_and_every_objective() -> None:
    assert set(reference.ESTIMATORS) == set(SETTINGS) == set(ESTIMATORS)
    assert set(reference_losses.OBJECTIVES) == set(POLICY_LOSSES)


def test_every_setting_that_an_estimator_reads_is_varied() -> None:
    for name, estimator in ESTIMATORS.items():
        for key in (read.removeprefix("algo.") for read in estimator.reads):
            assert any(getattr(algo, key) != getattr(AlgoConfig(), key) for algo in SETTINGS[name]), (name, key)


def spread(rows: list[list[float | None]], mask: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Spreads lists over the tokens that `mask` selects: (values (B, T), the tokens that count (B, T))."""
    values, counts = np.zeros((ROWS, WIDTH)), np.zeros((ROWS, WIDTH), dtype=bool)
    for b, row in enumerate(rows):
        for column, value in zip(np.flatnonzero(mask[b].numpy()), row, strict=True):
            values[b, column], counts[b, column] = value or 0.0, value is not None
    return values, counts


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_credit_is_that_of_the_papers(name: str, variant: int, around: dict[str, Any]) -> None:
    algo = replace(SETTINGS[name][variant], **around)
    for seed in range(8):
        case = random_case(seed, BAD[seed % len(BAD)])
        found, _ = credit(case.batch, case.inferred, resolve("x", name, "clipped_surrogate"), algo)
        expected, counts = spread(reference.credit(samples_of(case), name, algo), case.batch.response_mask)
        assert np.array_equal(found.mask, counts)
        assert np.allclose(found.advantages, expected, atol=5e-5, rtol=1e-4)
        assert counts.sum() < 8 or np.abs(expected).max() > 0.05  # the case has something to compare


@pytest.mark.parametrize("variant", range(len(SETTINGS["gae"])))
def test_returns_are_those_of_the_critics_own_lambda(variant: int) -> None:
    algo = replace(SETTINGS["gae"][variant], kl_reward_coef=0.1)
    for seed in range(8):
        case = random_case(seed)
        found, _ = credit(case.batch, case.inferred, resolve("x", "gae", "clipped_surrogate"), algo)
        penalised = [reference.penalised(sample, algo) for sample in samples_of(case)]
        expected, _ = spread([list(row) for row in reference.gae_returns(penalised, algo)], case.batch.response_mask)
        assert found.returns is not None
        assert np.allclose(found.returns, expected, atol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_correction_is_that_of_the_papers(mode: str, level: str) -> None:
    algo = AlgoConfig(correction=mode, correction_level=level, correction_max=1.5, correction_min=0.6)
    for seed in range(8):
        case = random_case(seed)
        mask, samples = case.batch.response_mask, samples_of(case)
        found = correct(case.inferred.old_logprobs, case.batch.rollout_logprobs, mask, algo)
        rho = [reference_losses.sequence_weights(sample.old, sample.sampler, level) for sample in samples]
        if mode == "truncate":
            weights: list[list[float | None]] = [[min(w, 1.5) for w in row] for row in rho]
        else:
            weights = [[w if 0.6 <= w <= 1.5 else None for w in row] for row in rho]
        expected, counts = spread(weights, mask)
        assert np.array_equal(found.mask, counts)
        assert np.allclose(found.weights, expected, rtol=1e-5, atol=1e-7)

        units = [(r, w) for rs, ws in zip(rho, weights, strict=True) for r, w in list(zip(rs, ws, strict=True))]
        if level == "sequence":
            units = [(rs[0], ws[0]) for rs, ws in zip(rho, weights, strict=True) if rs]
        used = [w or 0.0 for _, w in units]
        assert found.metrics == pytest.approx(
            {
                "correction/mean": reference.mean([r for r, _ in units]),
                "correction/max": max(r for r, _ in units),
                "correction/ess_frac": reference_losses.effective_share(used),
                "correction/masked_frac": sum(w is None for _, w in units) / len(units),
            },
            rel=1e-5,
        )


# Settings around every objective.
TERMS: list[dict[str, Any]] = [
    {},
    {"clip_ratio_low": 0.1, "clip_ratio_high": 0.5, "dual_clip": 2.0},
    {"kl_loss_coef": 0.3, "kl_loss_estimator": "k3", "entropy_coef": 0.2},
    {"kl_loss_coef": 0.3, "kl_loss_estimator": "k3", "kl_loss_gradient": "k2", "positive_nll_coef": 0.7},
    {"kl_loss_coef": 0.3, "kl_loss_estimator": "abs", "kl_loss_gradient": "k1", "entropy_coef": 0.1},
]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_objective_and_its_gradient_are_those_of_the_papers(name: str, terms: dict[str, Any], mode: str) -> None:
    algo = AlgoConfig(**terms, loss_aggregation=mode)
    for seed in range(3):
        batch, logprobs, entropy = train_case(seed, BAD[seed])
        batch = batch if seed else replace(batch, weights=None)
        variable = logprobs.clone().requires_grad_()
        output = policy_objective(variable, entropy, batch, POLICY_LOSSES[name].loss, algo, LONGEST)
        output.loss.backward()  # type: ignore[no-untyped-call]

        rows = rows_of(batch, entropy)
        at = [logprobs[b][batch.mask[b]].tolist() for b in range(ROWS)]

        def expected(new: list[list[float]], at: Any = at, rows: Any = rows) -> float:
            return reference_losses.policy_objective(new, at, rows, name, algo, LONGEST)

        slopes = [[reference_losses.slope(expected, at, b, t) for t in range(len(row))] for b, row in enumerate(at)]
        assert output.loss.item() == pytest.approx(expected(at), abs=1e-5, rel=1e-5)
        assert variable.grad is not None
        assert np.allclose(variable.grad, spread([list(row) for row in slopes], batch.mask)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("bound", [None, 0.2, 1.0])
def test_value_objective_is_that_of_the_papers(mode: str, bound: float | None) -> None:
    for seed in range(4):
        batch, values, _ = train_case(seed, BAD[seed])
        output = value_objective(values, batch, value_clip=bound, aggregation=mode, max_tokens=LONGEST)
        assert batch.old_values is not None
        assert batch.returns is not None
        rows = []
        for b, own in enumerate(batch.mask):
            new, old, target = (column[b][own].tolist() for column in (values, batch.old_values, batch.returns))
            rows.append([reference_losses.value_loss(*token, bound) for token in zip(new, old, target, strict=True)])
        assert output.loss.item() == pytest.approx(reference_losses.aggregate(rows, mode, LONGEST), rel=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_is_its_definition(mode: str) -> None:
    for seed in range(6):
        batch, losses, _ = train_case(seed)
        counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences, "max_tokens": LONGEST}
        rows = [losses[b][own].tolist() for b, own in enumerate(batch.mask)]
        found = aggregate(losses, batch.mask, mode, **counts)
        assert found.item() == pytest.approx(reference_losses.aggregate(rows, mode, LONGEST), rel=1e-5)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("gradient", [None, *KL_ESTIMATORS])
def test_kl_estimators_are_their_definitions(estimator: str, gradient: str | None) -> None:
    numbers = np.random.default_rng(0).normal(size=200)
    logprobs = torch.tensor(numbers, dtype=torch.float32, requires_grad=True)
    found = kl(logprobs, torch.zeros(200), estimator, gradient)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert np.allclose(found.detach(), [reference_losses.kl_value(x, estimator) for x in numbers], atol=1e-5)
    slopes = {"k1": 1 + 0 * numbers, "k2": numbers, "k3": 1 - np.exp(-numbers), "abs": np.sign(numbers)}
    assert logprobs.grad is not None
    assert np.allclose(logprobs.grad, slopes[gradient or estimator], atol=1e-4)


def test_overlong_penalty_is_its_definition() -> None:
    for longest, buffer in ((100, 20), (7, 7), (30, 1), (20480, 4096)):
        for tokens in {0, 1, longest // 2, longest - buffer, longest - buffer + 1, longest - 1, longest, longest + 1}:
            assert math.isclose(
                overlong_penalty(tokens, longest, buffer), reference_losses.overlong(tokens, longest, buffer)
            )
