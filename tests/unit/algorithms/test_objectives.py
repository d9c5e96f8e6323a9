"""The objectives of actor and critic on a small model: every split of a mini-batch gives the same gradient, and no value
outside the mask is read, not even in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from unit_batches import batch_of, poison, random_mask

from tandem.platform.algorithms.logprobs import token_entropy, token_logprobs
from tandem.platform.algorithms.losses import AGGREGATIONS
from tandem.platform.algorithms.objectives import policy_objective, value_objective
from tandem.platform.algorithms.registry import POLICY_LOSSES
from tandem.platform.config.schema import AlgoConfig
from tandem.platform.experience.batch import LossOutput, TrainBatch
from tandem.platform.experience.partition import balance, microbatches

MODES = tuple(AGGREGATIONS)
LONGEST = 8
FULL = AlgoConfig(clip_ratio_high=0.28, dual_clip=3.0, kl_loss_coef=0.1, kl_loss_estimator="k3", entropy_coef=0.01)


class TinyModel(nn.Module):
    """Computes logits and values from a running mean of the embeddings so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.value = nn.Embedding(7, 6), nn.Linear(6, 7), nn.Linear(6, 1)

    def hidden(self, tokens: Tensor) -> Tensor:
        counts = torch.arange(1, tokens.shape[1] + 1)[None, :, None]
        embedded: Tensor = self.embedding(tokens.clamp(0, 6))
        return embedded.cumsum(dim=1) / counts

    def policy_loss(self, batch: TrainBatch, algo: AlgoConfig) -> LossOutput:
        tokens = batch.rollout.tokens
        logits = self.head(self.hidden(tokens)) * 2
        logprobs, entropy = token_logprobs(logits, tokens, 0.9), token_entropy(logits, 0.9)
        return policy_objective(logprobs, entropy, batch, POLICY_LOSSES["clipped_surrogate"].loss, algo, LONGEST)

    def value_loss(self, batch: TrainBatch, algo: AlgoConfig) -> LossOutput:
        after = self.value(self.hidden(batch.rollout.tokens)).squeeze(-1)
        values = nn.functional.pad(after[:, :-1], (1, 0))
        return value_objective(values, batch, value_clip=0.2, aggregation=algo.loss_aggregation, max_tokens=LONGEST)


MODEL = TinyModel()


def make_batch(seed: int = 0, rows: int = 7, width: int = 10) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    mask, lengths = random_mask(generator, rows, width)
    old, advantages, ref, values, returns = torch.randn(5, rows, width, generator=generator)
    tokens = torch.randint(0, 7, (rows, width), generator=generator)
    rollout = batch_of(mask, tokens=tokens, lengths=lengths)
    return TrainBatch(rollout, old - 2, advantages, ref - 2, values, returns).as_minibatch()


def gradient(parts: Sequence[TrainBatch], kind: str, algo: AlgoConfig) -> tuple[Tensor, float]:
    """(the gradient of all parameters, the loss), summed over the parts."""
    MODEL.zero_grad()
    total = 0.0
    for part in parts:
        output = getattr(MODEL, kind)(part, algo)
        output.loss.backward()
        total += output.loss.item()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in MODEL.parameters()]
    return torch.cat([grad.flatten() for grad in grads]).clone(), total


@pytest.mark.parametrize("kind", ["policy_loss", "value_loss"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_of_any_size_give_the_same_gradient(kind: str, mode: str, size: int) -> None:
    algo, batch = replace(FULL, loss_aggregation=mode), make_batch()
    whole, loss = gradient([batch], kind, algo)
    parts = [batch.select(range(n, min(n + size, 7))).trim() for n in range(0, 7, size)]
    cut, cut_loss = gradient(parts, kind, algo)
    assert whole.abs().max() > 1e-3
    assert torch.allclose(cut, whole, atol=1e-6)
    assert cut_loss == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("kind", ["policy_loss", "value_loss"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_and_token_budgets_give_the_same_gradient(kind: str, mode: str, ranks: int) -> None:
    algo, batch = replace(FULL, loss_aggregation=mode), make_batch(seed=3)
    whole, _ = gradient([batch], kind, algo)
    cut = torch.zeros_like(whole)
    for rows in balance(batch.rollout.lengths.tolist(), ranks):
        rank = batch.select(rows)
        parts = [rank.select(part).trim() for part in microbatches(rank.rollout.lengths.tolist(), 16)]
        cut += gradient([*parts, batch.blank()], kind, algo)[0]
    assert torch.allclose(cut, whole, atol=1e-6)


@pytest.mark.parametrize("kind", ["policy_loss", "value_loss"])
@pytest.mark.parametrize("seed", range(3))
def test_order_of_rows_does_not_matter(kind: str, seed: int) -> None:
    batch = make_batch(seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    whole, shuffled = gradient([batch], kind, FULL)[0], gradient([batch.select(order)], kind, FULL)[0]
    assert torch.allclose(shuffled, whole, atol=1e-6)


@pytest.mark.parametrize("kind", ["policy_loss", "value_loss"])
@pytest.mark.parametrize("mode", MODES)
def test_twenty_more_pads_change_nothing(kind: str, mode: str) -> None:
    algo, batch = replace(FULL, loss_aggregation=mode), make_batch(seed=1)

    def wide(tensor: Tensor | None, filler: float = math.nan) -> Tensor:
        assert tensor is not None
        return torch.cat([tensor, torch.full((7, 20), filler).to(tensor.dtype)], dim=1)

    old = batch.rollout
    rollout = batch_of(wide(old.response_mask, 0), tokens=wide(old.tokens, -1), lengths=old.lengths)
    columns = (wide(batch.old_logprobs), wide(batch.advantages), wide(batch.ref_logprobs))
    wider = TrainBatch(rollout, *columns, wide(batch.old_values), wide(batch.returns)).as_minibatch()
    assert torch.allclose(gradient([wider], kind, algo)[0], gradient([batch], kind, algo)[0], atol=1e-6)


def poisoned(batch: TrainBatch, bad: float) -> TrainBatch:
    names = ("old_logprobs", "advantages", "ref_logprobs", "old_values", "returns")
    changes: dict[str, Any] = {name: poison(getattr(batch, name), batch.mask, bad) for name in names}
    return replace(batch, **changes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(bad: float, estimator: str) -> None:
    algo, batch = replace(FULL, kl_loss_estimator=estimator), make_batch(seed=2)
    for kind in ("policy_loss", "value_loss"):
        plain, loss = gradient([batch], kind, algo)
        found, found_loss = gradient([poisoned(batch, bad)], kind, algo)
        assert torch.equal(found, plain)
        assert found_loss == loss
        expected = getattr(MODEL, kind)(batch, algo)
        output = getattr(MODEL, kind)(poisoned(batch, bad), algo)
        assert [(n.item(), d.item()) for n, d in output.metrics.values()] == [
            (n.item(), d.item()) for n, d in expected.metrics.values()
        ]
        assert output.maxima == expected.maxima


def leaves(batch: TrainBatch, logprobs: Tensor, algo: AlgoConfig) -> tuple[LossOutput, Tensor, Tensor]:
    """The policy objective of given log-probs, with the gradients of log-probs and entropy."""
    variable, entropy = logprobs.clone().requires_grad_(), torch.ones_like(logprobs).requires_grad_()
    output = policy_objective(variable, entropy, batch, POLICY_LOSSES["clipped_surrogate"].loss, algo, LONGEST)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert variable.grad is not None
    return output, variable.grad, torch.zeros_like(logprobs) if entropy.grad is None else entropy.grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_model_outputs_outside_the_mask_have_zero_gradient(bad: float, estimator: str) -> None:
    algo, batch = replace(FULL, kl_loss_estimator=estimator), make_batch(seed=4)
    logprobs = poison(torch.full((7, 10), -1.5), batch.mask, bad)
    output, grad, entropy_grad = leaves(batch, logprobs, algo)
    assert output.loss.isfinite()
    assert grad.isfinite().all()
    assert entropy_grad.isfinite().all()
    assert not grad[~batch.mask].any()
    assert not entropy_grad[~batch.mask].any()


@pytest.mark.parametrize("new", [-1e3, -1.0, -math.inf])
@pytest.mark.parametrize("old", [-1e3, -1.0, -math.inf])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_extreme_log_ratios_are_finite(new: float, old: float, estimator: str) -> None:
    algo, batch = replace(FULL, kl_loss_estimator=estimator), make_batch(seed=5)
    batch = replace(batch, old_logprobs=torch.full((7, 10), old), ref_logprobs=torch.full((7, 10), old))
    output, grad, _ = leaves(batch, torch.full((7, 10), new), algo)
    assert output.loss.isfinite()
    assert grad.isfinite().all()
    for numerator, _ in output.metrics.values():
        assert numerator.isfinite()


def one_row(old: list[float], advantages: list[float], ref: list[float] | None = None) -> TrainBatch:
    """A row of one prompt token and these response tokens."""

    def padded(numbers: list[float]) -> Tensor:
        return torch.tensor([[0.0, *numbers]])

    mask = torch.tensor([[False] + [True] * len(old)])
    reference = None if ref is None else padded(ref)
    return TrainBatch(batch_of(mask), padded(old), padded(advantages), reference).as_minibatch()


def test_policy_objective_by_hand() -> None:
    # ratios exp(.2) = 1.221403 and exp(-.5) = .606531; advantages 1 and -1; clip .2
    # surrogate: -1.2 (clipped) and .8 (clipped); k3 of lr .5 and -.5: .106531 and .148721; entropy 1 each
    algo = AlgoConfig(kl_loss_coef=2.0, entropy_coef=0.1)
    batch = one_row([-1.2, -1.5], [1.0, -1.0], [-1.5, -1.5])
    output, grad, entropy_grad = leaves(batch, torch.tensor([[0.0, -1.0, -2.0]]), algo)
    assert output.loss.item() == pytest.approx((-1.2 + 0.8 + 2 * (0.106531 + 0.148721)) / 2 - 0.1, abs=1e-6)
    # only the KL pulls: 2 (1 - exp(-lr)) / 2
    assert np.allclose(grad, [[0, 1 - math.exp(-0.5), 1 - math.exp(0.5)]], atol=1e-6)
    assert np.allclose(entropy_grad, [[0, -0.05, -0.05]])
    values = {name: (n.item(), d.item()) for name, (n, d) in output.metrics.items()}
    assert values["policy/kl"] == pytest.approx((0.106531 + 0.148721, 2), abs=1e-6)
    # approximate KL(old || new) with lr = old - new: k3(-.2) = exp(.2) - 1 - .2; k3(.5)
    assert values["policy/approx_kl"] == pytest.approx((0.021403 + 0.106531, 2), abs=1e-6)
    assert values["policy/clip_frac"] == (2, 2)
    assert values["policy/entropy"] == (2, 2)
    assert values["policy/loss"] == pytest.approx((output.loss.item(), 1.0))
    assert output.maxima["policy/ratio_max"].item() == pytest.approx(1.221403, abs=1e-6)


def test_first_update_is_on_policy() -> None:
    output, grad, _ = leaves(one_row([-1.0, -2.0], [3.0, -1.0]), torch.tensor([[0.0, -1.0, -2.0]]), AlgoConfig())
    assert output.maxima["policy/ratio_max"].item() == 1.0
    assert output.metrics["policy/clip_frac"][0].item() == 0
    assert output.metrics["policy/approx_kl"][0].item() == 0
    assert np.allclose(grad, [[0, -1.5, 0.5]])


def test_kl_pulls_with_advantage_zero() -> None:
    algo = AlgoConfig(kl_loss_coef=1.0, kl_loss_estimator="k2")
    _, grad, _ = leaves(one_row([-1.0], [0.0], [-1.5]), torch.tensor([[0.0, -1.0]]), algo)
    assert np.allclose(grad, [[0, 0.5]])


def test_constant_group_keeps_its_kl_and_its_tokens() -> None:
    algo = AlgoConfig(kl_loss_coef=1.0)
    alone = leaves(one_row([-1.0], [0.0], [-1.5]), torch.tensor([[0.0, -1.0]]), algo)[0]
    assert alone.loss.item() == pytest.approx(0.106531, abs=1e-6)
    both = leaves(one_row([-1.0, -1.0], [0.0, 1.0], [-1.5, -1.0]), torch.tensor([[0.0, -1.0, -1.0]]), algo)[0]
    assert both.loss.item() == pytest.approx((0.106531 - 1.0) / 2, abs=1e-6)


def test_kl_term_is_there_only_when_its_coefficient_is_on() -> None:
    batch = one_row([-1.0], [0.0], [-1.5])
    output, grad, _ = leaves(batch, torch.tensor([[0.0, -1.0]]), AlgoConfig())
    assert output.loss.item() == 0
    assert not grad.any()
    assert "policy/kl" in output.metrics  # measured even if it is not in the loss
    assert "policy/kl" not in leaves(one_row([-1.0], [0.0]), torch.tensor([[0.0, -1.0]]), AlgoConfig())[0].metrics
    with pytest.raises(AssertionError, match="needs reference log-probs"):
        leaves(one_row([-1.0], [0.0]), torch.tensor([[0.0, -1.0]]), AlgoConfig(kl_loss_coef=0.1))


def test_value_objective_by_hand() -> None:
    mask = torch.tensor([[False, True, True]])
    old, returns = torch.tensor([[9.0, 1, 1]]), torch.tensor([[9.0, 2, 1]])
    batch = TrainBatch(batch_of(mask), torch.zeros(1, 3), torch.zeros(1, 3), None, old, returns).as_minibatch()
    values = torch.tensor([[5.0, 1.5, 1.5]], requires_grad=True)
    output = value_objective(values, batch, value_clip=0.2, aggregation="token-mean", max_tokens=LONGEST)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert output.loss.item() == pytest.approx((0.32 + 0.125) / 2)
    assert values.grad is not None
    assert np.allclose(values.grad, [[0, 0, 0.25]])
    assert [x.item() for x in output.metrics["critic/clip_frac"]] == [1, 2]


def test_value_objective_names_what_is_missing() -> None:
    batch = make_batch()
    for partial, text in ((replace(batch, old_values=None), "old values"), (replace(batch, returns=None), "returns")):
        with pytest.raises(AssertionError, match=text):
            value_objective(torch.zeros(7, 10), partial, value_clip=0.2, aggregation="token-mean", max_tokens=8)


@pytest.mark.parametrize("kind", ["policy_loss", "value_loss"])
def test_batch_without_a_token_is_zero_and_finite(kind: str) -> None:
    batch = make_batch()
    silent = replace(batch, rollout=replace(batch.rollout, response_mask=torch.zeros(7, 10, dtype=torch.bool)))
    grad, loss = gradient([silent.as_minibatch()], kind, FULL)
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("kind", ["policy_loss", "value_loss"])
def test_loss_metric_adds_up_to_the_loss_of_the_mini_batch(kind: str) -> None:
    batch = make_batch(seed=6)
    name = {"policy_loss": "policy/loss", "value_loss": "critic/loss"}[kind]
    pairs = [getattr(MODEL, kind)(batch.select([row]), FULL).metrics[name] for row in range(7)]
    assert sum(d.item() for _, d in pairs) == pytest.approx(1.0)
    assert sum(n.item() for n, _ in pairs) == pytest.approx(getattr(MODEL, kind)(batch, FULL).loss.item(), abs=1e-6)
