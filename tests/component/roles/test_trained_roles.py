"""Actor, critic and reference with real DeepSpeed, one rank, in this process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from role_cases import actor, critic, samples, train_batch, weights

from tandem.platform.config.schema import ActorConfig, ConfigError, ModelConfig
from tandem.platform.experience.batch import Inferred, TrainBatch
from tandem.platform.loop.metrics import reduce_totals
from tandem.platform.loop.protocols import TrainingError
from tandem.workers.cluster.runtime import Rank
from tandem.workers.models.loading import load_policy
from tandem.workers.roles.actor import ActorWorker
from tandem.workers.roles.reference import ReferenceSpec, ReferenceWorker


def test_first_update_is_on_policy(tiny_path: str) -> None:
    """Log-probs and update use different micro-batches, yet the ratio is 1, nothing is clipped, and approximate KL is 0."""
    batch = samples()
    old = actor(tiny_path, budget=1).logprobs(batch)
    metrics = reduce_totals([actor(tiny_path, budget=30).update([train_batch(batch, old)])])
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/clip_frac"] == 0
    assert metrics["policy/approx_kl"] < 1e-6


def test_logprobs_do_not_depend_on_padding(tiny_path: str) -> None:
    worker, batch = actor(tiny_path), samples()
    wide = {
        name: torch.cat([getattr(batch, name), torch.full((len(batch), 20), filler)], dim=1)
        for name, filler in (
            *(("tokens", 12), ("response_mask", False), ("step_ends", True)),
            *(("rollout_logprobs", 9.0), ("token_rewards", 9.0)),
        )
    }
    padded = replace(batch, **wide)
    expected = worker.logprobs(batch)
    assert torch.allclose(worker.logprobs(padded)[:, : expected.shape[1]], expected, atol=1e-4)
    assert worker.logprobs(padded)[:, expected.shape[1] :].abs().max() == 0


@pytest.mark.parametrize("make", [actor, critic])
@pytest.mark.parametrize("budget", [1, 12, 20])
def test_the_update_does_not_depend_on_the_cut(tiny_path: str, make: object, budget: int) -> None:
    batch = samples()
    old = torch.full(batch.tokens.shape, -2.0)
    whole, cut = make(tiny_path), make(tiny_path, budget=budget)  # type: ignore[operator]
    start = weights(whole)
    parts = [train_batch(batch, old), train_batch(batch, old, seed=2)]
    one, other = reduce_totals([whole.update(parts)]), reduce_totals([cut.update(parts)])
    assert torch.allclose(weights(whole), weights(cut), atol=1e-5)
    assert (weights(whole) - start).abs().max() > 1e-3
    assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("make", [actor, critic])
def test_every_trainable_tensor_moves(tiny_path: str, make: object) -> None:
    worker, batch = make(tiny_path), samples()  # type: ignore[operator]
    totals = worker.update([train_batch(batch, torch.full(batch.tokens.shape, -2.0))])
    # The critic's head starts at zero, so its body has no gradient in the first update.
    if make is critic:
        assert {name for name in totals.unmoved if "head" in name} == set()
        totals = worker.update([train_batch(batch, torch.full(batch.tokens.shape, -2.0))])
    assert totals.unmoved == frozenset()


def test_a_tensor_that_stands_still_is_named(tiny_path: str) -> None:
    worker, batch = actor(tiny_path), train_batch(samples(), torch.full(samples().tokens.shape, -2.0))
    name, parameter = next(iter(worker.backend.engine.module.named_parameters()))  # type: ignore[attr-defined]
    parameter.register_hook(torch.zeros_like)
    assert worker.update([batch]).unmoved == {f"actor: {name}"}


def test_row_order_does_not_change_the_update(tiny_path: str) -> None:
    batch = train_batch(samples(), torch.full(samples().tokens.shape, -2.0))
    one, other = actor(tiny_path), actor(tiny_path)
    one.update([batch])
    other.update([batch.select([5, 3, 1, 0, 2, 4])])
    assert torch.allclose(weights(one), weights(other), atol=1e-5)


def test_blank_rows_count_for_nothing(tiny_path: str) -> None:
    worker, batch = actor(tiny_path), train_batch(samples(), torch.full(samples().tokens.shape, -2.0))
    start = weights(worker)
    worker.update([replace(batch.blank(), num_tokens=0, num_sequences=0)])
    assert torch.equal(weights(worker), start)


def test_values_stand_before_their_token(tiny_path: str) -> None:
    """The value of a prefix does not read the token after it; `final` reads all of them."""
    worker, batch = critic(tiny_path), samples()
    with torch.no_grad():
        worker.backend.engine.module.head.weight.normal_(generator=torch.Generator().manual_seed(3))  # type: ignore[attr-defined]
    first = worker.values(batch)
    changed = batch.tokens.clone()
    last = batch.lengths - 1
    changed[torch.arange(len(batch)), last] = 3 + (changed[torch.arange(len(batch)), last] - 2) % 12
    second = worker.values(replace(batch, tokens=changed))
    assert torch.allclose(first.values, second.values, atol=1e-5)
    assert (first.final - second.final).abs().min() > 1e-4


def test_values_are_zero_before_training(tiny_path: str) -> None:
    assert critic(tiny_path).values(samples()).values.abs().max() == 0


def test_reference_equals_the_actor_before_training_and_stays(tiny_path: str) -> None:
    batch = samples()
    reference = ReferenceWorker(ReferenceSpec(tiny_path, ModelConfig(), 0.8, 10_000), Rank())
    reference.start()
    policy = actor(tiny_path)
    before = reference.logprobs(batch)
    assert torch.allclose(before, policy.logprobs(batch), atol=1e-5)
    policy.update([train_batch(batch, before)])
    assert torch.equal(reference.logprobs(batch), before)
    assert not torch.allclose(policy.logprobs(batch), before, atol=1e-3)


@pytest.mark.parametrize(("value", "gradient"), [("k2", None), ("k3", None), ("abs", None), ("k1", "k2"), ("k3", "k2")])
def test_a_kl_loss_alone_pulls_the_policy_to_the_reference(tiny_path: str, value: str, gradient: str | None) -> None:
    batch = samples()
    policy = actor(tiny_path, kl_loss_coef=1.0, kl_loss_estimator=value, kl_loss_gradient=gradient)
    reference = policy.logprobs(batch) + torch.where(batch.response_mask, 0.5, 0.0)

    def distance() -> float:
        return float((policy.logprobs(batch) - reference)[batch.response_mask].square().mean())

    start = distance()
    for _ in range(5):
        whole = TrainBatch(batch, policy.logprobs(batch), torch.zeros_like(reference), ref_logprobs=reference)
        policy.update([whole.as_minibatch()])
    assert distance() < start


def test_gradients_that_are_not_finite_end_the_run(tiny_path: str) -> None:
    batch = samples()
    broken = replace(
        train_batch(batch, torch.zeros(batch.tokens.shape)), advantages=torch.full(batch.tokens.shape, math.inf)
    )
    with pytest.raises(TrainingError, match=r"actor: the gradient norm is (nan|inf).*actor\.lr"):
        actor(tiny_path).update([broken])


def test_memory_is_counted_from_the_tensors(tiny_path: str) -> None:
    worker, batch = actor(tiny_path), samples()
    worker.update([train_batch(batch, torch.zeros(batch.tokens.shape))])
    count, memory = weights(worker).numel(), worker.memory()
    assert memory["weights"] == memory["gradients"] == 4 * count
    tensors = len(list(worker.backend.engine.module.parameters()))  # type: ignore[attr-defined]
    assert memory["optimizer"] == 8 * count + 4 * tensors  # two moments, and a step counter per tensor
    assert memory["peak"] > memory["weights"]


def test_inferred_shapes_are_checked() -> None:
    with pytest.raises(AssertionError, match="ref_logprobs has shape"):
        Inferred(torch.zeros(2, 3), ref_logprobs=torch.zeros(2, 4))


def test_learning_rate_warms_up_linearly(tiny_path: str) -> None:
    worker = actor(tiny_path)
    spec = replace(worker.spec, actor=ActorConfig(lr=1e-6, lr_warmup_steps=10))
    worker = ActorWorker(spec, Rank())
    worker.start()
    batch = train_batch(samples(), torch.zeros(samples().tokens.shape))
    rates = [reduce_totals([worker.update([batch])])["policy/lr"] for _ in range(11)]
    assert rates == pytest.approx([1e-7 * step for step in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10)])


def test_a_parameter_without_dimensions_is_refused_by_name(tiny_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(tiny_path, ModelConfig())
    policy.model.norm.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.5)))
    monkeypatch.setattr("tandem.workers.roles.actor.load_policy", lambda path, config: policy)
    with pytest.raises(ConfigError, match=r"the model of the actor: parameter model\.norm\.scale is a single number"):
        actor(tiny_path)
