"""Weights on their way from two ZeRO ranks to two replicas: what arrives is what a fresh engine would load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.launch.compose import compose
from tandem.launch.roles import RayRoles
from tandem.platform.algorithms import resolve
from tandem.platform.batch import Prompt, Rollout, RolloutBatch, Score, TrainBatch
from tandem.platform.config import Config, ModelConfig
from tandem.platform.protocols import Roles, Sampling
from tandem.workers.models import load_policy
from tandem.workers.rollout import RolloutSpec, RolloutWorker
from tandem.workers.runtime import Rank
from tandem.workers.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

SAMPLING = Sampling(samples=1, temperature=0.0, max_tokens=6, seed=(0,))
PROMPTS = [Prompt(tuple(range(3, 5 + number)), number, "") for number in range(6)]


def make(path: str, *overrides: str) -> Config:
    fixed = [f"model.path={path}", "actor.ranks=2", "rollout.replicas=2", "actor.lr=0.05", "trainer.bucket_mb=1"]
    small = ["rollout.max_response_tokens=6", "cluster.num_cpus=2", "rollout=hf"]
    return compose(["algo=grpo", *fixed, *small, *overrides])[0]


@pytest.fixture
def cluster() -> Iterator[float]:
    from tandem.platform.config import ClusterConfig
    from tandem.workers.cluster import connected

    with connected(ClusterConfig(num_cpus=2)) as cpus:
        yield cpus


def publish(roles: Roles, version: int) -> None:
    """One synchronisation."""
    for bucket in roles.actor.weight_buckets():
        roles.rollouts.load_weights(bucket)
    roles.rollouts.finish_weights(version, roles.actor.weight_checksums())


def train(roles: Roles, rollouts: list[Rollout]) -> None:
    """One update that moves every weight."""
    batch = RolloutBatch.from_rollouts(rollouts, [Score(float(n % 2)) for n in range(len(rollouts))])
    advantages = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    roles.actor.update([TrainBatch(batch, roles.actor.logprobs(batch), advantages).as_minibatch()])


@pytest.mark.parametrize(("transport", "stage"), [("shared", 3), ("broadcast", 3), ("broadcast", 0)])
def test_replicas_equal_a_fresh_engine(tiny_path: str, tmp_path: Path, cluster: float, transport: str, stage: int) -> None:
    config = make(tiny_path, f"trainer.weight_transport={transport}", f"trainer.zero_stage={stage}")
    ray_roles = RayRoles(config, resolve("grpo", "grpo", "clipped_surrogate"), tiny_path, cluster)
    try:
        roles = ray_roles.wait()
        publish(roles, 0)
        before = roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))
        train(roles, before)
        publish(roles, 1)
        after = roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))
        save(tiny_path, whole_weights(roles), tmp_path)
    finally:
        ray_roles.close()
    fresh = RolloutWorker(RolloutSpec(str(tmp_path), ModelConfig(), config.rollout), Rank())
    fresh.start()
    expected = fresh.generate(PROMPTS, SAMPLING)
    assert [one.response_ids for one in after] == [one.response_ids for one in expected]
    for one, other in zip(after, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert {one.policy_version for one in after} == {1}
    assert [one.logprobs for one in after] != [one.logprobs for one in before]


def whole_weights(roles: Roles) -> dict[str, Tensor]:
    """The trainer's weights, in the calls."""
    import ray

    buckets = roles.actor.weight_buckets(shared=True)  # type: ignore[call-arg]
    return {name: tensor for ref in buckets for name, tensor in ray.get(ref).content.items()}


def save(path: str, weights: dict[str, Tensor], folder: Path) -> None:
    """The model at `path` with other weights, as a folder; its output layer is tied to its embedding."""
    model = load_policy(path, ModelConfig())
    assert model.config.tie_word_embeddings
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensor.shape == own[name].shape  # no shard, no empty tensor
        own[name].data.copy_(tensor)
    model.save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)


def test_a_replica_that_joins_late_has_the_same_weights(tiny_path: str, cluster: float) -> None:
    """It gets them in the calls, and the broadcast has one more set of ends from then on."""
    import ray

    config = make(tiny_path, "trainer.weight_transport=broadcast")
    ray_roles = RayRoles(config, resolve("grpo", "grpo", "clipped_surrogate"), tiny_path, cluster)
    try:
        roles = ray_roles.wait()
        publish(roles, 0)
        expected = roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))
        ray.kill(ray_roles.ranks["rollout"].handles[0])
        again = roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))
        assert [one.response_ids for one in again] == [one.response_ids for one in expected]
        train(roles, again)
        publish(roles, 1)
        assert {one.policy_version for one in roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))} == {1}
        assert roles.rollouts.restarts == 1
    finally:
        ray_roles.close()
