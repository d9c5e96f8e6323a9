"""Placement: which rank of which role sits in which bundle, and with how much of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.platform.config import ConfigError, PlacementConfig

MOST_AUTOMATIC_CPUS = 8.0  # more threads than this rarely help one rank
RESERVE_TIMEOUT_S = 10.0
SMALLEST = 1e-4  # what Ray can count: less is float rounding


@dataclass(frozen=True)
class Slot:
    """The place of one rank."""

    role: str
    rank: int
    bundle: int
    cpus: float
    gpus: float
    threads: int


@dataclass(frozen=True)
class Placement:
    """Bundles of resources and the ranks in them."""

    bundles: tuple[Mapping[str, float], ...]
    slots: tuple[Slot, ...]
    strategy: str

    def amount(self, resource: str) -> float:
        """How much of a resource all bundles hold."""
        return float(sum(bundle.get(resource, 0.0) for bundle in self.bundles))

    def of(self, role: str) -> list[Slot]:
        """The slots of a role, by rank."""
        return [slot for slot in self.slots if slot.role == role]


def plan_placement(
    ranks: Mapping[str, int],
    on_gpu: Collection[str],
    config: PlacementConfig,
    total_cpus: float,
    wide: Mapping[str, int] | None = None,
) -> Placement:
    """The bundles for `ranks` (ranks by role); roles in `on_gpu` get a device or a share of one, those in `wide` as many
    devices to each rank as it says where bundles are not shared.

    colocated: as many bundles as the widest role has ranks; rank i of each role shares bundle i and they take turns,
    so each may use all of its threads. split: one bundle for each rank of each role.
    """
    if config.name == "colocated":
        places = [(role, rank, rank) for role, count in ranks.items() for rank in range(count)]
    else:
        pairs = [(role, rank) for role, count in ranks.items() for rank in range(count)]
        places = [(role, rank, bundle) for bundle, (role, rank) in enumerate(pairs)]
    count = 1 + max(bundle for _, _, bundle in places)
    cpus = config.cpus_per_bundle or _share(min(total_cpus / count, MOST_AUTOMATIC_CPUS), 1)
    threads = config.threads_per_rank or max(1, int(cpus))
    bundles, slots = [], []
    for bundle in range(count):
        tenants = [(role, rank) for role, rank, place in places if place == bundle]
        devices = [role for role, _ in tenants if role in on_gpu]
        width = float((wide or {}).get(devices[0], 1)) if len(devices) == 1 else 1.0
        bundles.append({"CPU": cpus, "GPU": width} if devices else {"CPU": cpus})
        for role, rank in tenants:
            gpus = _share(width, len(devices)) if role in devices else 0.0
            slots.append(Slot(role, rank, bundle, _share(cpus, len(tenants)), gpus, threads))
    return Placement(tuple(bundles), tuple(slots), config.strategy)


def sorted_by_node(placement: Placement, homes: Mapping[int, str]) -> Placement:
    """The same placement with the ranks of a node side by side: equal bundles change places, in the order of their nodes.

    Args:
        homes: node of each bundle, as Ray placed them.
    """
    nodes = sorted(set(homes.values()))
    moved: dict[int, int] = {}
    for kind in {tuple(sorted(bundle.items())) for bundle in placement.bundles}:
        alike = [number for number, bundle in enumerate(placement.bundles) if tuple(sorted(bundle.items())) == kind]
        moved |= zip(alike, sorted(alike, key=lambda number: (nodes.index(homes[number]), number)), strict=True)
    slots = tuple(replace(slot, bundle=moved[slot.bundle]) for slot in placement.slots)
    return replace(placement, slots=slots)


def _share(amount: float, parts: int) -> float:
    """An equal part, rounded down to what Ray can count (1/1000), so that the parts never exceed the whole."""
    return math.floor(amount / parts * 1000) / 1000


def check_fits(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuses a placement that nodes with these resources can never hold.

    Raises:
        ConfigError: with a table of what is asked and available, and the keys to change.
    """
    free = [dict(node) for node in nodes]
    lacking = []
    # Bundles with a GPU choose first: those without one would take the CPUs beside it.
    for bundle in sorted(placement.bundles, key=lambda bundle: (-bundle.get("GPU", 0.0), -bundle["CPU"])):
        home = next((node for node in free if all(node.get(kind, 0) > n - SMALLEST for kind, n in bundle.items())), None)
        if home is None:
            lacking.append(bundle)
            continue
        for kind, amount in bundle.items():
            home[kind] -= amount
    if lacking:
        raise ConfigError(_table(placement, nodes, len(lacking)))


def _table(placement: Placement, nodes: Sequence[Mapping[str, float]], lacking: int) -> str:
    lines = [f"{lacking} of {len(placement.bundles)} bundles do not fit on the cluster", ""]
    lines.append(f"  {'resource':<9} {'asked':>8} {'available':>10}   largest node   largest bundle")
    for kind in ("CPU", "GPU"):
        asked = [bundle.get(kind, 0.0) for bundle in placement.bundles]
        there = [node.get(kind, 0.0) for node in nodes]
        largest = max(there, default=0.0)
        lines.append(f"  {kind:<9} {sum(asked):>8g} {sum(there):>10g}   {largest:>12g}   {max(asked):>14g}")
    roles = ", ".join(f"{role} {len(placement.of(role))}" for role in dict.fromkeys(s.role for s in placement.slots))
    lines += ["", f"  ranks: {roles}"]
    lines.append(
        "  Lower actor.ranks, critic.ranks, rollout.replicas or placement.cpus_per_bundle, set placement=colocated, "
        "trainer.device=cpu, or give the cluster more"
    )
    return "\n".join(lines)


def reserve(placement: Placement) -> Any:
    """A Ray placement group that holds the bundles.

    Raises:
        ConfigError: within seconds, where they can never fit, or others hold what is needed.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_fits(placement, nodes)
    group = ray.util.placement_group([dict(bundle) for bundle in placement.bundles], strategy=placement.strategy)
    if not group.wait(RESERVE_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        available = {kind: n for kind, n in ray.available_resources().items() if kind in ("CPU", "GPU")}
        raise ConfigError(
            f"the bundles {[dict(bundle) for bundle in placement.bundles]} with placement.strategy={placement.strategy} "
            f"could not be reserved in {RESERVE_TIMEOUT_S:g} s; free now: {available}. Others may hold the rest: wait for "
            "them, ask for less, or set placement.strategy=PACK"
        )
    return group
