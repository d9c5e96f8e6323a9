"""The state of a model under training: after saving and loading, training continues as if uninterrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tandem.platform.config.schema import ActorConfig, ModelConfig, TrainerConfig
from tandem.platform.experience.batch import LossOutput, Prompt, Rollout, RolloutBatch, Score, StopReason, TrainBatch
from tandem.workers.cluster.runtime import Rank, Rendezvous
from tandem.workers.training.deepspeed import DeepSpeedBackend
from tandem.workers.training.random_states import random_states, set_random_states
from tandem.workers.training.state import StateError


class Line(nn.Module):
    """A model with parameters whose gradients are the input."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start))
        self.y = nn.Linear(2, 2)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.x * gradient).sum() + self.y(torch.ones(2, dtype=self.x.dtype)).square().sum()


def backend(
    stage: int, dtype: str = "float32", start: Sequence[float] = (0.0, 0.0, 0.0), **optimizer: float
) -> DeepSpeedBackend:
    torch.manual_seed(len(start))
    model = Line(start).to(getattr(torch, dtype))
    settings = ActorConfig(
        **{"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0, **optimizer}
    )  # type: ignore[arg-type]
    meeting = Rendezvous(1, 60)
    trainer, config = TrainerConfig(zero_stage=stage, bucket_mb=1), ModelConfig(dtype=dtype)
    return DeepSpeedBackend(
        model, "actor", settings, trainer, config, Rank(threads=1), torch.device("cpu"), (meeting.address, meeting, 60)
    )


def blank() -> TrainBatch:
    prompt = Prompt((1,), 0, "")
    batch = RolloutBatch.from_rollouts([Rollout(prompt, (2,), (True,), (0.0,), StopReason.STOP, 0, "")], [Score(1.0)])
    zeros = torch.zeros(batch.tokens.shape)
    return TrainBatch(batch, zeros, zeros).as_minibatch()


def step(one: DeepSpeedBackend, gradient: float) -> dict[str, tuple[float, float]]:
    def objective(forward: object, batch: TrainBatch) -> LossOutput:
        return LossOutput(forward(torch.tensor(gradient)), {})  # type: ignore[operator]

    return dict(one.step([blank()], objective).sums)


def moved(one: DeepSpeedBackend, into: DeepSpeedBackend) -> None:
    """Copies the training state of one backend into another."""
    parts = [{name: tensor.clone() for name, tensor in part.items()} for part in one.state_parts()]
    assert len(parts) == one.state_part_count()
    into.begin_load(one.updates())
    for part in parts:
        into.load_part(part)
    into.end_load(one.updates())


def state(one: DeepSpeedBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for part in one.state_parts() for name, tensor in part.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "later"), [(0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (3, 0), (2, 3)])
def test_two_updates_and_two_more_are_four(stage: int, later: int, dtype: str) -> None:
    """Weights, moments and learning rate are bitwise equal, even if training continues with another ZeRO stage."""
    straight, first = backend(stage, dtype, lr_warmup_steps=3), backend(stage, dtype, lr_warmup_steps=3)
    for gradient in (1.0, 0.5):
        assert step(straight, gradient) == step(first, gradient)
    second = backend(later, dtype, start=(9.0, 9.0, 9.0, 9.0)[:3], lr_warmup_steps=3)
    moved(first, second)
    for gradient in (-1.0, 2.0):
        expected = step(straight, gradient)
        assert step(second, gradient)["policy/lr"] == expected["policy/lr"]
    one, other = state(straight), state(second)
    assert one.keys() == other.keys()
    assert {name.partition("/")[0] for name in one} == {"weights", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(one[name], other[name]) for name in one)
    named = [dict(part) for part in (next(straight.named_weights(1 << 20)), next(second.named_weights(1 << 20)))]
    assert all(torch.equal(named[0][name], named[1][name]) for name in named[0])  # the model itself, too


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adam_by_hand(stage: int) -> None:
    """With lr 0.1 and gradients 1, 1 and, after a restart, -1, -1: lost moments would give -0.1 and 0."""
    first = backend(stage)
    seen = []
    for gradient in (1.0, 1.0):
        step(first, gradient)
        seen.append(float(state(first)["weights/x"][0]))
    second = backend(stage, start=(5.0, 5.0, 5.0))
    moved(first, second)
    for gradient in (-1.0, -1.0):
        step(second, gradient)
        seen.append(float(state(second)["weights/x"][0]))
    assert seen == pytest.approx([-0.1, -0.2, -0.226199, -0.215702], abs=1e-6)


def test_the_warm_up_goes_on() -> None:
    """The warm-up takes ten updates to reach 1e-6, so the sixth update, after a restart, has 6e-7."""
    first = backend(0, lr=1e-6, lr_warmup_steps=10)
    for _ in range(5):
        step(first, 1.0)
    second = backend(0, lr=1e-6, lr_warmup_steps=10)
    moved(first, second)
    assert step(second, 1.0)["policy/lr"] == (pytest.approx(6e-7), 1.0)


def test_before_the_first_update_there_are_no_moments() -> None:
    first, second = backend(1), backend(1, start=(3.0, 3.0, 3.0))
    moved(first, second)
    assert second.updates() == 0
    step(first, 1.0)
    step(second, 1.0)
    assert all(torch.equal(tensor, state(second)[name]) for name, tensor in state(first).items())


def load(one: DeepSpeedBackend, part: dict[str, Tensor]) -> None:
    """Loads a state after one update, in one part."""
    one.begin_load(1)
    one.load_part(part)
    one.end_load(1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda part: part.pop("exp_avg/y.weight"), r"lacks 1 tensors, exp_avg/y\.weight first"),
        (lambda part: part.update({"weights/x": torch.zeros(2)}), r"weights/x has shape \(2,\), this model's \(3,\)"),
        (lambda part: part.update({"weights/z": torch.zeros(2)}), "has weights/z, which this model does not have"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: object, why: str) -> None:
    first, second = backend(0), backend(0)
    step(first, 1.0)
    part = state(first)
    change(part)  # type: ignore[operator]
    with pytest.raises(StateError, match=why):
        load(second, part)


def test_random_generators_go_on_through_json() -> None:
    import random

    import numpy as np

    np.random.standard_normal()  # leaves a spare number behind
    kept = json.loads(json.dumps(random_states()))
    expected = random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()
    set_random_states(kept)
    assert (random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == expected
