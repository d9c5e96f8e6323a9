"""Builds the roles of a run: as Ray actors in placement groups, or in this process."""

from __future__ import annotations

import time
from typing import Any

from tandem.platform.algorithms import Algorithm
from tandem.platform.config import Config
from tandem.platform.plan import role_ranks
from tandem.platform.protocols import Roles
from tandem.workers.actor import ActorSpec, ActorWorker
from tandem.workers.critic import CriticSpec, CriticWorker
from tandem.workers.inline import InlineRollouts
from tandem.workers.placement import Placement, plan_placement
from tandem.workers.reference import ReferenceSpec, ReferenceWorker
from tandem.workers.reward import RewardRank
from tandem.workers.rollout import RolloutSpec, RolloutWorker
from tandem.workers.runtime import Rank

WORKERS: dict[str, Any] = {
    "rollout": RolloutWorker,
    "reward": RewardRank,
    "actor": ActorWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
}


def role_specs(config: Config, algorithm: Algorithm, path: str) -> dict[str, Any]:
    """What a rank of each role that the run needs is made from. `path`: the model's folder or hub name."""
    budget, longest = config.train.max_tokens_per_microbatch, config.rollout.max_response_tokens
    timeout_s, temperature = config.cluster.call_timeout_s, config.rollout.temperature
    specs: dict[str, Any] = {
        "rollout": RolloutSpec(path, config.model, config.rollout, algorithm.estimator.rewards_steps),
        "reward": config.reward,
        "actor": ActorSpec(
            path,
            config.model,
            config.actor,
            config.trainer,
            config.algo,
            algorithm.objective.loss,
            temperature,
            longest,
            budget,
            timeout_s,
        ),
    }
    if config.needs_reference:
        specs["reference"] = ReferenceSpec(path, config.model, temperature, budget)
    if algorithm.needs_critic:
        specs["critic"] = CriticSpec(
            config.critic.path or path,
            config.model,
            config.critic,
            config.trainer,
            config.algo.loss_aggregation,
            longest,
            budget,
            timeout_s,
        )
    return specs


def inline_workers(config: Config, algorithm: Algorithm, path: str) -> dict[str, Any]:
    """The workers of every role in this process, one rank each, with their models loaded."""
    rank = Rank(device=config.trainer.device)
    workers = {name: WORKERS[name](spec, rank) for name, spec in role_specs(config, algorithm, path).items()}
    for worker in workers.values():
        worker.start()
    return workers


def inline_roles(workers: dict[str, Any]) -> Roles:
    """Workers in this process as the roles that the driver asks."""
    return Roles(
        actor=workers["actor"],
        rewards=workers["reward"],
        rollouts=InlineRollouts(workers["rollout"]),
        critic=workers.get("critic"),
        reference=workers.get("reference"),
    )


def placement_of(config: Config, algorithm: Algorithm, cpus: float, gpu: bool) -> Placement:
    """The bundles of the run on a cluster with so many CPUs; every role with a model gets a device if `gpu`."""
    ranks = role_ranks(config, algorithm)
    with_model = [name for name in ranks if name != "reward" or config.reward.model is not None]
    return plan_placement(ranks, with_model if gpu else (), config.placement, cpus)


def wants_gpu(config: Config, available: bool) -> bool:
    """Whether models go on GPUs, where `available` says if there are any."""
    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and available)


class RayRoles:
    """The roles as Ray actors named `<role>-<rank>`: created at once, ready after `wait`, ended by `close`."""

    def __init__(self, config: Config, algorithm: Algorithm, path: str, cpus: float) -> None:
        import ray

        from tandem.workers.placement import reserve

        self.config = config
        on_gpu = wants_gpu(config, ray.cluster_resources().get("GPU", 0.0) > 0)
        self.placement = placement_of(config, algorithm, cpus, on_gpu)
        self.ranks: dict[str, Any] = {}
        self.group: Any = reserve(self.placement)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        homes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        self._nodes = {bundle: nodes.get(home, "unknown") for bundle, home in homes.items()}
        device = "cuda" if on_gpu else "cpu"
        self._starting = {
            name: self._spawn(name, spec, device) for name, spec in role_specs(config, algorithm, path).items()
        }

    def wait(self) -> Roles:
        """Waits until every rank has loaded its model; raises WorkerFailed naming the one that did not."""
        from tandem.workers import groups

        deadline = time.monotonic() + self.config.cluster.startup_timeout_s
        for name, refs in self._starting.items():
            self.ranks[name].wait("start", refs, max(0.0, deadline - time.monotonic()))
        return Roles(
            actor=groups.ActorGroup(self.ranks["actor"]),
            rewards=groups.RewardGroup(self.ranks["reward"]),
            rollouts=groups.RolloutGroup(self.ranks["rollout"]),
            critic=groups.CriticGroup(self.ranks["critic"]) if "critic" in self.ranks else None,
            reference=groups.ReferenceGroup(self.ranks["reference"]) if "reference" in self.ranks else None,
        )

    def close(self) -> None:
        """Ends the actors and frees the bundles."""
        import ray

        from tandem.workers.groups import kill

        for ranks in self.ranks.values():
            kill(ranks)
        self.ranks = {}
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
            self.group = None

    def _spawn(self, name: str, spec: Any, device: str) -> list[Any]:
        """Creates the ranks of a role; returns what `start` will give, without waiting."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from tandem.workers.calls import Ranks

        slots = self.placement.of(name)
        handles = []
        for slot in slots:
            options = {
                "name": f"{name}-{slot.rank}",
                "num_cpus": slot.cpus,
                "num_gpus": slot.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, slot.bundle),
            }
            rank = Rank(slot.rank, len(slots), slot.threads, device if slot.gpus or device == "cpu" else "cpu")
            handles.append(ray.remote(WORKERS[name]).options(**options).remote(spec, rank))
        nodes = [self._nodes[slot.bundle] for slot in slots]
        self.ranks[name] = Ranks(name, handles, nodes, self.config.cluster.call_timeout_s)
        if name in ("actor", "critic"):
            meeting = handles[0].address.remote()
            return [handle.start.remote(meeting) for handle in handles]
        return [handle.start.remote() for handle in handles]
