"""Weight transfer from two ZeRO ranks to two replicas: the replicas receive the weights that a fresh engine would load."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from privacy import is_loopback, listening, outsider, session, who_tells
from torch import Tensor

from tandem.launch.assembly.ray_roles import RayRoles
from tandem.launch.compose.compose import compose
from tandem.platform.algorithms.registry import resolve
from tandem.platform.config.schema import Config, ModelConfig
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, TrainBatch
from tandem.platform.loop.protocols import Roles, Sampling
from tandem.workers.cluster.private_cluster import TOKEN
from tandem.workers.cluster.runtime import Rank
from tandem.workers.models.loading import load_policy
from tandem.workers.models.tokenizer import load_tokenizer
from tandem.workers.roles.rollout import RolloutSpec, RolloutWorker

pytestmark = pytest.mark.slow

SAMPLING = Sampling(samples=1, temperature=0.0, max_tokens=6, seed=(0,))
LONG = Prompt(tuple(range(3, 15)) * 12, 6, "")  # longer than a block of vLLM's prefix cache
PROMPTS = [*(Prompt(tuple(range(3, 5 + number)), number, "") for number in range(6)), LONG]


def make(path: str, *overrides: str) -> Config:
    fixed = [f"model.path={path}", "actor.ranks=2", "rollout.replicas=2", "actor.lr=0.05", "trainer.bucket_mb=1"]
    small = [
        "rollout.max_response_tokens=6",
        "cluster.num_cpus=2",
        "rollout.kv_cache_gb=0.0625",
        "data.max_prompt_tokens=144",
    ]
    return compose(["algo=grpo", *fixed, *small, *overrides])[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A private cluster; its files are removed when it ends."""
    from tandem.platform.config.schema import ClusterConfig
    from tandem.workers.cluster.cluster import connected

    with connected(ClusterConfig(num_cpus=2)):
        folder = session()
        yield
    assert not folder.exists()
    assert TOKEN not in os.environ


@pytest.fixture(scope="module")
def stranger(cluster: None) -> Iterator[subprocess.Popen[str]]:
    """A process that tries to join while the tests run; Ray gives up after 20 seconds."""
    process = outsider()
    yield process
    process.kill()


def publish(roles: Roles, version: int) -> None:
    """Synchronises the weights once."""
    for bucket in roles.actor.weight_buckets():
        roles.rollouts.load_weights(bucket)
    roles.rollouts.finish_weights(version, roles.actor.weight_checksums())


def train(roles: Roles, rollouts: list[Rollout]) -> None:
    """Takes one update that changes every weight."""
    batch = RolloutBatch.from_rollouts(rollouts, [Score(float(n % 2)) for n in range(len(rollouts))])
    advantages = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    roles.actor.update([TrainBatch(batch, roles.actor.logprobs(batch), advantages).as_minibatch()])


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small embedded model with attention heads wide enough for vLLM on a CPU."""
    from tandem.platform.config.schema import TaskConfig, TinyConfig, WarmstartConfig
    from tandem.workers.models.tiny import prepare_tiny

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CACHE", str(tmp_path_factory.mktemp("cache")))
        small = TinyConfig(hidden_size=64, intermediate_size=64, layers=2, heads=2)
        return str(prepare_tiny(ModelConfig(tiny=small, warmstart=WarmstartConfig(steps=0)), TaskConfig()))


@pytest.mark.parametrize(
    ("engine", "transport", "stage"),
    [("hf", "shared", 3), ("vllm", "broadcast", 3)],
)
def test_replicas_equal_a_fresh_engine(
    wide_path: str,
    tmp_path: Path,
    cluster: None,
    stranger: subprocess.Popen[str],
    engine: str,
    transport: str,
    stage: int,
) -> None:
    """Also for long prompts that are in the prefix cache. All sockets that listen meanwhile are on the loopback."""
    wanted = [f"rollout={engine}", f"trainer.weight_transport={transport}", f"trainer.zero_stage={stage}"]
    config = make(wide_path, *wanted)
    ray_roles = RayRoles(config, resolve("grpo", "grpo", "clipped_surrogate"), wide_path, print)
    try:
        roles = ray_roles.wait()
        publish(roles, 0)
        before = roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))
        train(roles, before)
        publish(roles, 1)
        sockets = listening()
        after = roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING))
        save(wide_path, whole_weights(roles), tmp_path)
        spec = replace(ray_roles.specs["rollout"], path=str(tmp_path))
    finally:
        ray_roles.close()
    expected = fresh(spec)
    assert [one.response_ids for one in after] == [one.response_ids for one in expected]
    for one, other in zip(after, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert {one.policy_version for one in after} == {1}
    assert [one.logprobs for one in after] != [one.logprobs for one in before]
    assert sum("Actor" in process for process, _ in sockets) > 4  # Ray's, the store's, gloo's
    assert [one for one in sockets if not is_loopback(one[1])] == []


def test_no_one_else_joins_a_private_cluster_or_reads_its_files(cluster: None, stranger: subprocess.Popen[str]) -> None:
    folder, token = session(), os.environ[TOKEN]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*.log")) != []
    assert who_tells(token, folder) == []
    said, _ = stranger.communicate(timeout=180)
    assert "InvalidAuthToken" in said
    assert "joined" not in said


def fresh(spec: RolloutSpec) -> list[Rollout]:
    """The samples of an engine that starts with these weights, in its own process."""
    import ray

    worker: Any = ray.remote(num_cpus=1)(RolloutWorker).remote(spec, Rank(threads=1))  # type: ignore[attr-defined]
    ray.get(worker.start.remote(), timeout=300)
    rollouts = ray.get(worker.generate.remote(PROMPTS, SAMPLING), timeout=180)
    ray.kill(worker)
    return list(rollouts)


def test_every_replica_takes_its_weights_from_the_rank_beside_it(
    tiny_path: str, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with CUDA IPC, but through the object store: both ranks send the same whole weights."""
    import ray

    config = make(tiny_path, "rollout=hf", "trainer.zero_stage=3", "trainer.checksum_every=1")
    monkeypatch.setattr(RayRoles, "_transport", lambda roles: ("shared", [0, 1]))
    ray_roles = RayRoles(config, resolve("grpo", "grpo", "clipped_surrogate"), tiny_path, print)
    try:
        roles = ray_roles.wait()
        for rank in ray_roles.ranks["actor"].handles:
            ray.get(rank.__ray_call__.remote(lambda worker: setattr(type(worker._transport), "from_every_rank", True)))
        publish(roles, 0)
        train(roles, roles.rollouts.collect(roles.rollouts.submit(PROMPTS, SAMPLING)))
        publish(roles, 1)  # compares the checksums of both replicas
        assert roles.rollouts.restarts == 0
    finally:
        ray_roles.close()


def whole_weights(roles: Roles) -> dict[str, Tensor]:
    """The trainer's weights, sent in the calls."""
    import ray

    buckets = roles.actor.weight_buckets(shared=True)  # type: ignore[call-arg]
    return {name: tensor for refs in buckets for name, tensor in ray.get(refs[0]).content.unpack().items()}


def save(path: str, weights: dict[str, Tensor], folder: Path) -> None:
    """Saves the model at `path` with other weights; its output layer is tied to its embedding."""
    model = load_policy(path, ModelConfig())
    assert model.config.tie_word_embeddings
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensor.shape == own[name].shape  # not a shard or an empty tensor
        own[name].data.copy_(tensor)
    model.save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)


def test_a_replica_that_joins_late_has_the_same_weights(tiny_path: str, cluster: None) -> None:
    """It receives them in the calls; later broadcasts use a new set of ends."""
    import ray

    config = make(tiny_path, "rollout=hf", "trainer.weight_transport=broadcast")
    ray_roles = RayRoles(config, resolve("grpo", "grpo", "clipped_surrogate"), tiny_path, print)
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
