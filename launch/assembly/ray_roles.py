"""The roles of a run as Ray actors in a placement group."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tandem.launch.assembly.roles import WORKERS, files_of, request_of, role_specs, takes_turns, wants_gpu
from tandem.platform.algorithms.registry import Algorithm
from tandem.platform.config.schema import Config
from tandem.platform.loop.protocols import Roles
from tandem.workers.cluster.node_files import check_nodes
from tandem.workers.cluster.placement import sorted_by_node
from tandem.workers.cluster.runtime import Rank, process_id
from tandem.workers.groups.ranks import Watch
from tandem.workers.groups.weights import WeightChannel
from tandem.workers.roles.rollout import ENGINES, engine_name
from tandem.workers.sync.transports import choose_transport


class RayRoles:
    """The roles as Ray actors named `<role>-<rank>`: created at once, ready after `wait`, ended by `close`."""

    def __init__(self, config: Config, algorithm: Algorithm, path: str, note: Callable[[str], None]) -> None:
        """Reserves resources and creates the actors, without waiting for their models to load; `note` shows a line.

        Raises:
            ConfigError: the cluster has too few resources, or a node lacks a file that the roles need.
        """
        import ray

        from tandem.workers.cluster.placement import reserve

        self.config = config
        on_gpu = wants_gpu(config, ray.cluster_resources().get("GPU", 0.0) > 0)
        self.device = "cuda" if on_gpu else "cpu"
        self.specs = role_specs(config, algorithm, path)
        self.ranks: dict[str, Any] = {}
        self._watch = Watch()
        request, name = request_of(config, algorithm, on_gpu), f"{config.run.name}-{uuid.uuid4().hex[:6]}"
        placement, self.group = reserve(request, name, config.cluster.reserve_timeout_s, note)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        homes = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        self.placement = sorted_by_node(placement, homes)
        self._nodes = {bundle: (nodes.get(home, "unknown"), home) for bundle, home in homes.items()}
        # Checked before models are loaded, which may take minutes.
        tenants: dict[int, list[str]] = {}
        for slot in self.placement.slots:
            tenants.setdefault(slot.bundle, []).append(slot.role)
        files = files_of(config, path, list(self.specs))
        check_nodes(files, self.group, self._nodes, tenants, config.cluster.startup_timeout_s, note)
        self._channel, self._takes_turns = WeightChannel(*self._transport()), takes_turns(config, on_gpu)
        self._starting = {name: self._spawn_all(name) for name in self.specs}

    def wait(self) -> Roles:
        """Waits until every rank has loaded its model; WorkerFailed names a rank that did not."""
        from tandem.workers.groups.facades import ActorGroup, CriticGroup, ReferenceGroup, RewardGroup
        from tandem.workers.groups.rollouts import RolloutGroup

        deadline = time.monotonic() + self.config.cluster.startup_timeout_s
        for name, (pids, starts) in self._starting.items():
            self._note_pids(name, pids, deadline)
            self.ranks[name].wait("start", starts, max(0.0, deadline - time.monotonic()))
        actor = ActorGroup(self.ranks["actor"], self._channel)
        rollouts = RolloutGroup(
            self.ranks["rollout"],
            self.config.rollout.max_batch_sequences,
            continuous=self._is_continuous,
            source=actor,
            start=lambda rank: self._start_again("rollout", rank),
            channel=self._channel,
        )
        rollouts.connect()
        return Roles(
            actor=actor,
            rewards=RewardGroup(self.ranks["reward"], lambda rank: self._start_again("reward", rank)),
            rollouts=rollouts,
            critic=CriticGroup(self.ranks["critic"]) if "critic" in self.ranks else None,
            reference=ReferenceGroup(self.ranks["reference"]) if "reference" in self.ranks else None,
            devices=self.placement.amount("GPU" if self.device == "cuda" else "CPU"),
            takes_turns=self._takes_turns,
        )

    def close(self) -> None:
        """Ends the actors and frees the bundles."""
        import ray

        from tandem.workers.groups.facades import kill

        for ranks in self.ranks.values():
            kill(ranks)
        self.ranks = {}
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
            self.group = None

    @property
    def _is_continuous(self) -> bool:
        """Whether the engine accepts new prompts while it samples others."""
        engine: Any = ENGINES[engine_name(self.config.rollout.engine, self.device == "cuda")]
        return bool(engine.continuous)

    def _transport(self) -> tuple[str, list[int]]:
        """The weight transport that fits the placement, and for each replica the actor rank that sends to it."""
        actors, replicas = self.placement.of("actor"), self.placement.of("rollout")
        nodes = [self._nodes[slot.bundle][1] for slot in (actors[0], *replicas)]
        in_bundle = {slot.bundle: slot.rank for slot in actors}
        partners = [in_bundle.get(slot.bundle) for slot in replicas]
        transport = choose_transport(self.config.trainer.weight_transport, nodes, self.device == "cuda", partners)
        return transport, [partner or 0 if transport == "ipc" else 0 for partner in partners]

    def _spawn_all(self, name: str) -> tuple[list[Any], list[Any]]:
        """Creates the ranks of a role; returns pending calls for their process ids and for `start`."""
        from tandem.workers.groups.ranks import Ranks

        cluster, spawned = self.config.cluster, [self._spawn(name, rank) for rank in range(len(self.placement.of(name)))]
        handles, homes = [handle for handle, _ in spawned], [home for _, home in spawned]
        can_restart = name in ("rollout", "reward")  # the other roles share a process group or have state
        self.ranks[name] = Ranks(
            name,
            handles,
            homes,
            cluster.call_timeout_s,
            (lambda rank: self._spawn(name, rank)) if can_restart else None,
            cluster.max_restarts,
            self._watch,
        )
        if not can_restart:
            self._watch.watched.append(self.ranks[name])
        pids = [handle.__ray_call__.remote(process_id) for handle in handles]
        if name in ("actor", "critic"):
            meeting = handles[0].address.remote()
            return pids, [handle.start.remote(meeting) for handle in handles]
        return pids, [handle.start.remote() for handle in handles]

    def _spawn(self, name: str, rank: int) -> tuple[Any, Any]:
        """A new actor for this rank, not started yet, and its home."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from tandem.workers.groups.ranks import Home
        from tandem.workers.groups.rollouts import QUEUED

        slots = self.placement.of(name)
        slot = slots[rank]
        options = {
            "num_cpus": slot.cpus,
            "num_gpus": slot.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, slot.bundle),
        }
        if name == "rollout" and self._is_continuous:  # all calls that may be queued, and some to control it
            calls = QUEUED * self.config.rollout.max_batch_sequences // self.config.group
            options["max_concurrency"] = 4 + calls
        if name == "reward":  # a call per prompt, enough to keep all processes busy
            options["max_concurrency"] = 4 + max(64, self.config.reward.processes)
        if name not in self.ranks:  # the name of a dead actor stays taken for a while
            options["name"] = f"{name}-{rank}"
        place = Rank(rank, len(slots), slot.threads, self.device if slot.gpus or self.device == "cpu" else "cpu")
        handle = ray.remote(WORKERS[name]).options(**options).remote(self.specs[name], place)
        return handle, Home(*self._nodes[slot.bundle])

    def _start_again(self, name: str, rank: int) -> Any:
        """Starts a replacement rank; returns its home."""
        ranks, timeout_s = self.ranks[name], self.config.cluster.startup_timeout_s
        handle = ranks.handles[rank]
        pid, ready = handle.__ray_call__.remote(process_id), handle.start.remote()
        number = ranks.wait_for("start", rank, pid, timeout_s)
        ranks.wait_for("start", rank, ready, timeout_s)
        return replace(ranks.homes[rank], pid=number)

    def _note_pids(self, name: str, pids: list[Any], deadline: float) -> None:
        ranks = self.ranks[name]
        numbers = ranks.wait("start", pids, max(0.0, deadline - time.monotonic()))
        ranks.homes = [replace(home, pid=pid) for home, pid in zip(ranks.homes, numbers, strict=True)]
