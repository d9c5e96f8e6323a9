"""Actor and critic on two Ray actors over gloo, at every ZeRO stage, give the results of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.platform.config.schema import ActorConfig, AlgoConfig, ClusterConfig, CriticConfig, ModelConfig, TrainerConfig
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, StopReason, TrainBatch
from tandem.platform.loop.metrics import reduce_totals
from tandem.workers.cluster.runtime import Rank
from tandem.workers.groups.facades import ActorGroup, CriticGroup
from tandem.workers.groups.ranks import Home, Ranks
from tandem.workers.roles.actor import ActorSpec, ActorWorker
from tandem.workers.roles.critic import CriticSpec, CriticWorker

pytestmark = pytest.mark.slow

EPS = 1e-3  # Adam divides by |gradient| + eps: with its usual 1e-8, rounding of a zero gradient becomes a full step


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    from tandem.workers.cluster.cluster import connected

    with connected(ClusterConfig(num_cpus=2)):
        yield
    seats.cache_clear()


class Handle:
    """Stands in for the Ray actor of the rank that currently runs in a seat."""

    def __init__(self, seat: Any) -> None:
        self.seat = seat

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.seat.call.remote(name, *arguments))


@cache
def seats(count: int) -> list[Any]:
    """Processes that tests reuse for one rank after another: loading the libraries takes longer than a test."""
    import ray

    class Seat:  # sent to the processes whole, since they cannot import this file
        def become(self, cls: type, spec: object, rank: Rank) -> None:
            self.worker = None
            self.worker = cls(spec, rank)

        def call(self, name: str, *arguments: Any) -> Any:
            return getattr(self.worker, name)(*arguments)

    return [ray.remote(Seat).options(num_cpus=0.25).remote() for _ in range(count)]


def spawn(cls: type, spec: object, count: int) -> Ranks:
    handles = [Handle(seat) for seat in seats(count)]
    ranks = Ranks("test", handles, [Home("here")] * count, timeout_s=120)
    ranks.wait("become", [one.seat.become.remote(cls, spec, Rank(n, count, threads=1)) for n, one in enumerate(handles)])
    meeting = handles[0].address.remote()
    ranks.wait("start", [handle.start.remote(meeting) for handle in handles])
    return ranks


def actor_spec(path: str, stage: int, policy_loss: str = "clipped_surrogate", budget: int = 24, **algo: Any) -> ActorSpec:
    return ActorSpec(
        path=path,
        model=ModelConfig(),
        actor=ActorConfig(lr=1e-2, grad_clip=0.5, eps=EPS),
        trainer=TrainerConfig(zero_stage=stage),
        algo=AlgoConfig(entropy_coef=0.01, policy_loss=policy_loss, **algo),
        temperature=1.0,
        max_response_tokens=8,
        max_tokens_per_microbatch=budget,
        timeout_s=60,
    )


def critic_spec(path: str, stage: int) -> CriticSpec:
    critic, trainer = CriticConfig(lr=1e-2, grad_clip=0.5, eps=EPS), TrainerConfig(zero_stage=stage)
    return CriticSpec(path, ModelConfig(), critic, trainer, "seq-mean-token-mean", 8, 24, 60)


def samples() -> RolloutBatch:
    """Seven rows of uneven lengths; one of them is unscorable."""
    draw = torch.Generator().manual_seed(0)
    rollouts, scores = [], []
    for row in range(7):
        prompt, response = 2 + row % 3, 1 + 2 * (row % 4)
        ids = torch.randint(3, 15, (prompt + response,), generator=draw).tolist()
        own = Prompt(ids=tuple(ids[:prompt]), group_id=row // 2, text="")
        mask, logprobs = (True,) * response, (-1.0,) * response
        rollouts.append(Rollout(own, tuple(ids[prompt:]), mask, logprobs, StopReason.STOP, 0, ""))
        scores.append(Score(reward=None if row == 5 else float(row % 2)))
    return RolloutBatch.from_rollouts(rollouts, scores)


def minibatches() -> list[TrainBatch]:
    """Mini-batches of uneven sizes; in the last one only one row counts, so one rank has no valid token."""
    batch = samples()
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(batch.tokens.shape, generator=draw)
    old = torch.full(batch.tokens.shape, -2.5)
    whole = TrainBatch(batch, old, noise, old_values=torch.zeros_like(old), returns=noise + 1)
    return [part.as_minibatch() for part in whole.split([[0, 1, 2, 3, 4], [6, 5], [2, 5]])]


def exported(group: ActorGroup) -> Tensor:
    import ray

    return torch.cat(
        [tensor.flatten() for bucket in group.weight_buckets() for tensor in ray.get(bucket[0]).content.unpack().values()]
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_actor_ranks_equal_one(tiny_path: str, stage: int) -> None:
    alone = ActorWorker(actor_spec(tiny_path, 0), Rank(threads=1))
    alone.start()
    expected = reduce_totals([alone.update(minibatches())])
    weights = torch.cat(
        [tensor.flatten() for bucket in alone.weight_buckets() for tensor in bucket.content.unpack().values()]
    )
    ranks = spawn(ActorWorker, actor_spec(tiny_path, stage), 2)
    group = ActorGroup(ranks)
    measured = reduce_totals([group.update(minibatches())])
    assert torch.allclose(exported(group), weights, atol=1e-5)
    assert measured == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert torch.allclose(group.logprobs(samples()), alone.logprobs(samples()), atol=1e-4)
    assert len(group.weight_checksums()) == len(alone.weight_checksums())
    ours, theirs = group.memory(), alone.memory()
    assert abs(ours["weights"] - theirs["weights"] * (1 if stage == 3 else 2)) < 0.2 * theirs["weights"]
    assert abs(ours["optimizer"] - theirs["optimizer"] * {0: 2, 1: 1.5, 2: 1.5, 3: 1.5}[stage]) < 0.2 * ours["optimizer"]


EVERYTHING = {"kl_loss_coef": 0.1, "kl_loss_estimator": "k3", "kl_loss_gradient": "k2", "positive_nll_coef": 0.1}


def full_minibatches() -> list[TrainBatch]:
    """The same mini-batches with every field that an objective may read."""
    draw = torch.Generator().manual_seed(2)
    parts = []
    for part in minibatches():
        weights = torch.rand(part.mask.shape, generator=draw) * 2
        positive = torch.arange(len(part)) % 2 == 0
        full = replace(part, ref_logprobs=part.old_logprobs - 0.2, weights=weights, positive=positive)
        parts.append(full.as_minibatch())
    return parts


@pytest.mark.parametrize(
    ("policy_loss", "count", "budget"),
    [("clipped_surrogate", 3, 100), ("gspo", 2, 10), ("cispo", 3, 24), ("policy_gradient", 1, 5)],
)
def test_every_objective_is_the_same_on_any_number_of_ranks(
    tiny_path: str, policy_loss: str, count: int, budget: int
) -> None:
    """One, two or three ranks, one to many micro-batches each, some ranks without a valid token."""
    alone = ActorWorker(actor_spec(tiny_path, 0, policy_loss, budget=10_000, **EVERYTHING), Rank(threads=1))
    alone.start()
    expected = reduce_totals([alone.update(full_minibatches())])
    weights = torch.cat(
        [tensor.flatten() for bucket in alone.weight_buckets() for tensor in bucket.content.unpack().values()]
    )
    ranks = spawn(ActorWorker, actor_spec(tiny_path, 0, policy_loss, budget=budget, **EVERYTHING), count)
    group = ActorGroup(ranks)
    measured = group.update(full_minibatches())
    assert torch.allclose(exported(group), weights, atol=1e-5)
    assert reduce_totals([measured]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert measured.unmoved == frozenset()


def test_three_critic_ranks_equal_one(tiny_path: str) -> None:
    alone = CriticWorker(critic_spec(tiny_path, 0), Rank(threads=1))
    alone.start()
    expected = reduce_totals([alone.update(minibatches())])
    ranks = spawn(CriticWorker, critic_spec(tiny_path, 0), 3)
    group = CriticGroup(ranks)
    assert reduce_totals([group.update(minibatches())]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert torch.allclose(group.values(samples()).values, alone.values(samples()).values, atol=1e-4)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_critic_ranks_equal_one(tiny_path: str, stage: int) -> None:
    alone = CriticWorker(critic_spec(tiny_path, 0), Rank(threads=1))
    alone.start()
    expected = reduce_totals([alone.update(minibatches())])
    values = alone.values(samples())
    ranks = spawn(CriticWorker, critic_spec(tiny_path, stage), 2)
    group = CriticGroup(ranks)
    assert reduce_totals([group.update(minibatches())]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    measured = group.values(samples())
    assert torch.allclose(measured.values, values.values, atol=1e-4)
    assert torch.allclose(measured.final, values.final, atol=1e-4)


def test_ranks_hold_the_same_weights_in_bfloat16(tiny_path: str) -> None:
    """If the gradients of a micro-batch were not reduced, the ranks would drift apart."""
    import ray

    spec = replace(actor_spec(tiny_path, 1), model=ModelConfig(dtype="bfloat16"))
    ranks = spawn(ActorWorker, spec, 2)
    ActorGroup(ranks).update(minibatches())
    scores = ray.get([handle.logprobs.remote(samples()) for handle in ranks.handles])
    assert torch.equal(scores[0], scores[1])
