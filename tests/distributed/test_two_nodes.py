"""Two Ray nodes on this machine: placement with fake GPUs, and a PPO run across two nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.cluster.runtime import NOSET

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of two nodes, each with 1 CPU and 2 invented GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv(NOSET, "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2})
    try:
        cluster.add_node(num_cpus=1, num_gpus=2)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_ranks_use_the_devices_ray_gave_them(two_nodes: Any) -> None:
    """One bundle per device: ranks are sorted by node, share no device, and each reports the device that Ray chose."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from tandem.platform.config.schema import ConfigError, PlacementConfig
    from tandem.workers.cluster.placement import Request, reserve, sorted_by_node

    ray.init(address=two_nodes.address, log_to_driver=False)
    placement, group = reserve(Request({"actor": 4}, PlacementConfig(cpus_per_bundle=0.5), ["actor"]), "own", 10.0, print)
    homes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    placement = sorted_by_node(placement, homes)

    def look() -> tuple[str, list[int], int]:
        from tandem.workers.cluster.runtime import own_device_index

        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids(), own_device_index()

    refs = []
    for slot in placement.of("actor"):
        strategy = PlacementGroupSchedulingStrategy(group, slot.bundle)
        options = {"num_cpus": slot.cpus, "num_gpus": slot.gpus, "scheduling_strategy": strategy}
        refs.append(ray.remote(look).options(**options).remote())
    found = ray.get(refs, timeout=60)
    assert all(given == [index] for _, given, index in found)
    assert len({(node, index) for node, _, index in found}) == 4
    assert len({node for node, _, _ in found}) == 2
    nodes = [node for node, _, _ in found]
    assert nodes == sorted(nodes, key=nodes.index)

    notes: list[str] = []
    with pytest.raises(ConfigError) as caught:  # nothing is free
        reserve(Request({"actor": 1}, PlacementConfig(name="split")), "other", 0.3, notes.append)
    assert "1 CPU asked, no CPU of 2 CPU and 4 GPU free; own holds 2 CPU and 4 GPU. Raise" in str(caught.value)
    assert notes[0].startswith("waiting for resources, 0 s more at most: 1 CPU asked")
    ray.util.remove_placement_group(group)


def test_what_an_algorithm_without_critic_frees(two_nodes: Any) -> None:
    """Of four invented GPUs, PPO takes three with a bundle per role and GRPO two; colocated, each role has more of one."""
    import ray

    from tandem.launch.assembly.roles import request_of
    from tandem.launch.compose.compose import compose
    from tandem.platform.algorithms.registry import algorithm_of
    from tandem.workers.cluster.placement import reserve

    ray.init(address=two_nodes.address, log_to_driver=False)
    free, shares = {}, {}
    for algo in ("ppo", "grpo"):
        for placement in ("split", "colocated"):
            config, _ = compose([f"algo={algo}", f"placement={placement}", "placement.cpus_per_bundle=0.25"])
            algorithm = algorithm_of(config)
            planned, group = reserve(request_of(config, algorithm, gpu=True), "own", 10.0, print)
            free[algo, placement] = available_gpus(4 - sum(bundle.get("GPU", 0) for bundle in planned.bundles))
            shares[algo, placement] = planned.of("actor")[0].gpus
            ray.util.remove_placement_group(group)
    assert free == {("ppo", "split"): 1, ("ppo", "colocated"): 3, ("grpo", "split"): 2, ("grpo", "colocated"): 3}
    assert (shares["ppo", "colocated"], shares["grpo", "colocated"]) == (0.333, 0.5)


def available_gpus(expected: float) -> float:
    """The number of free GPUs, once Ray reports it."""
    import ray

    deadline = time.monotonic() + 15
    while (found := ray.available_resources().get("GPU", 0.0)) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.fixture
def two_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[str]]]:
    """Two Ray nodes: (the head's address, the prefix that runs a command on the head's host).

    If network namespaces are permitted, each node has its own, so the nodes cannot reach each other's loopback, and the
    second node sees `tmp_path/own` as an empty folder. Otherwise both nodes have this machine's address.
    """
    from ray.cluster_utils import Cluster

    names = [f"tandem-{os.getpid()}-{number}" for number in range(2)]
    if subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode != 0:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        yield cluster.address, []
        cluster.shutdown()
        return
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the default of `ray start` depends on the user's files
    try:
        (tmp_path / "own").mkdir()
        yield start_nodes(names, str(tmp_path_factory.mktemp("ray")), tmp_path / "own"), ["ip", "netns", "exec", names[0]]
    finally:
        for name in names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in found.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name])


GUIDE = re.findall(r"^(?:ray|tandem) .*$", (Path(__file__).parents[2] / "docs" / "two_hosts.md").read_text(), re.MULTILINE)
"""The commands of the guide: Ray on the first host, on the others, and the run."""


def start_nodes(names: list[str], folder: str, hidden: Path) -> str:
    """Connects two network namespaces and starts a Ray node with 1 CPU in each; returns the head's address.

    `ip netns exec` runs a command in its own mount namespace, in which an empty file system covers the folder `hidden`.
    """

    def do(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)

    first, other = (shlex.split(line.replace("HEAD", "10.77.0.1")) for line in GUIDE[:2])
    ray = str(Path(sys.executable).parent / "ray")
    do(f"ip netns add {names[1]}")
    do(f"ip link add t0 netns {names[0]} type veth peer name t1 netns {names[1]}")
    for number, name in enumerate(names):
        do(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev t{number}")
        do(f"ip -n {name} link set t{number} up")
        do(f"ip -n {name} link set lo up")
    common = "--num-cpus=1 --disable-usage-stats"
    head = f"{' '.join(first[1:])} --node-ip-address=10.77.0.1 --include-dashboard=false --temp-dir={folder}"
    do(f"ip netns exec {names[0]} {ray} {head} {common}")
    second = f"{ray} {' '.join(other[1:])} --node-ip-address=10.77.0.2 {common}"
    script = f"mount -t tmpfs none '{hidden}' && exec {second}"
    subprocess.run(["ip", "netns", "exec", names[1], "sh", "-c", script], check=True, capture_output=True, timeout=60)
    return "10.77.0.1:6379"


def test_ppo_across_two_hosts(two_hosts: tuple[str, list[str]], tiny_path: str, repo: Path, tmp_path: Path) -> None:
    """Two ranks of actor and critic and two replicas, spread over the hosts, so weights travel by broadcast."""
    address, before = two_hosts
    overrides = [
        *shlex.split(GUIDE[2].replace("HEAD:6379", address))[2:],
        *(f"model.path={tiny_path}", "rollout=hf", "placement.strategy=STRICT_SPREAD"),
        *("trainer.device=cpu", "trainer.checksum_every=1", "run.steps=2", "run.name=two", f"run.dir={tmp_path}"),
        *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "task.eval_size=4"),
    ]
    command = [*before, sys.executable, "launch/main.py", *overrides]
    if before:
        hidden = shutil.copytree(tiny_path, tmp_path / "own" / "model")
        lacking = [*command, f"model.path={hidden}", "run.name=lacking"]
        done = subprocess.run(lacking, cwd=repo, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        said = f"model.path: {hidden} does not exist on node 10.77.0.2, which runs rollout, actor, critic. Put it at the"
        assert said in done.stderr
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[-1]["rollout/logprob_gap"] < 1e-4  # the replicas hold the trained weights
    assert steps[-1]["policy/version"] == 2
