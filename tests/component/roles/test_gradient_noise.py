"""The variance of the gradient, estimated from two halves of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from role_cases import actor, samples, train_batch, weights
from torch import Tensor

from tandem.platform.algorithms.credit import halves
from tandem.platform.experience.batch import TrainBatch
from tandem.platform.loop.metrics import reduce_totals
from tandem.workers.roles.actor import ActorWorker


def batch_of(worker: ActorWorker) -> TrainBatch:
    rows = samples()
    return train_batch(rows, worker.logprobs(rows))


def gradient(worker: ActorWorker, part: TrainBatch) -> Tensor:
    """The gradient from a single backward pass."""
    model = worker.backend.engine.module  # type: ignore[attr-defined]
    gradients = torch.autograd.grad(worker._objective(model, part).loss, list(model.parameters()))
    return torch.cat([one.flatten() for one in gradients]).double()


def test_halves_are_every_other_prompt_with_their_own_denominators(tiny_path: str) -> None:
    batch = batch_of(actor(tiny_path))  # groups 0, 0, 1, 1, 2, 2
    first, second = halves(batch)
    assert first.rollout.group_ids.tolist() == [0, 0, 2, 2]
    assert second.rollout.group_ids.tolist() == [1, 1]
    assert first.num_tokens + second.num_tokens == batch.num_tokens
    assert (first.num_sequences, second.num_sequences) == (4, 2)


def test_one_prompt_has_no_halves(tiny_path: str) -> None:
    assert halves(batch_of(actor(tiny_path)).select([0, 1])) == []


def test_noise_is_the_distance_of_the_halves_gradients(tiny_path: str) -> None:
    worker = actor(tiny_path)
    parts = halves(batch_of(worker))
    one, other = (gradient(worker, part) for part in parts)
    found = reduce_totals([worker.gradient_noise(parts)])
    variance = float((one - other).square().sum()) / 4
    assert found["policy/gradient_variance"] == pytest.approx(variance, rel=1e-5)
    assert found["policy/gradient_noise"] == pytest.approx(variance / float(((one + other) / 2).square().sum()), rel=1e-5)


def test_the_cut_into_micro_batches_does_not_matter(tiny_path: str) -> None:
    whole, cut = actor(tiny_path), actor(tiny_path, budget=16)
    parts = halves(batch_of(whole))
    assert reduce_totals([cut.gradient_noise(parts)]) == pytest.approx(
        reduce_totals([whole.gradient_noise(parts)]), rel=1e-4
    )


def test_equal_halves_have_no_noise(tiny_path: str) -> None:
    worker = actor(tiny_path)
    first, _ = halves(batch_of(worker))
    assert reduce_totals([worker.gradient_noise([first, first])])["policy/gradient_noise"] == 0


def test_nothing_to_learn_is_no_division_by_zero(tiny_path: str) -> None:
    worker = actor(tiny_path)
    parts = [replace(part, advantages=torch.zeros_like(part.advantages)) for part in halves(batch_of(worker))]
    assert reduce_totals([worker.gradient_noise(parts)]) == {"policy/gradient_variance": 0.0}


def test_measuring_does_not_disturb_training(tiny_path: str) -> None:
    watched, alone = actor(tiny_path), actor(tiny_path)
    batch = batch_of(alone)
    for _ in range(2):
        watched.gradient_noise(halves(batch))
        watched.update([batch])
        alone.update([batch])
    assert torch.equal(weights(watched), weights(alone))
