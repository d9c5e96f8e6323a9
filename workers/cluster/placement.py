"""Placement: assigns each rank of each role to a bundle and to a share of that bundle."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.platform.config.schema import ConfigError, PlacementConfig

MOST_AUTOMATIC_CPUS = 8.0  # more threads than this rarely help one rank
NOTE_EVERY_S = 5.0
RANK_SETTINGS = {"rollout": "rollout.replicas", "actor": "actor.ranks", "critic": "critic.ranks"}
SMALLEST = 1e-4  # Ray's resource resolution; smaller amounts are float rounding
Nodes = Sequence[Mapping[str, float]]  # the resources of each node, "CPU" and "GPU" among them


@dataclass(frozen=True)
class Slot:
    """The bundle and the resources of one rank."""

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
        """The total amount of a resource in all bundles."""
        return float(sum(bundle.get(resource, 0.0) for bundle in self.bundles))

    def of(self, role: str) -> list[Slot]:
        """The slots of a role, in order of rank."""
        return [slot for slot in self.slots if slot.role == role]


@dataclass(frozen=True)
class Request:
    """The resources that a run asks for."""

    ranks: Mapping[str, int]  # by role
    config: PlacementConfig
    on_gpu: Collection[str] = ()  # roles that get a device, or a share of one
    wide: Mapping[str, int] = field(default_factory=dict)  # devices per rank, by role, in bundles that are not shared


def plan_placement(request: Request, nodes: Nodes) -> Placement:
    """Plans the bundles for a request on these nodes. The nodes may be too small for the plan; see `check_fits`.

    colocated: as many bundles as the role with most ranks has ranks. Rank i of each role shares bundle i, and the roles
    take turns, so each may use all threads of the bundle. split: one bundle for each rank of each role. Without
    `placement.cpus_per_bundle`, each bundle gets the largest number of CPUs with which all fit, at most 8.
    """
    config = request.config
    if config.cpus_per_bundle is not None:
        return _with_cpus(request, config.cpus_per_bundle)
    count = len(_with_cpus(request, 1.0).bundles)
    # The best sizes divide the CPUs of a node by a whole number of bundles.
    sizes = {min(node.get("CPU", 0.0) / parts, MOST_AUTOMATIC_CPUS) for node in nodes for parts in range(1, count + 1)}
    for cpus in sorted({_share(size, 1) for size in sizes} - {0.0}, reverse=True):
        if not lacking(placement := _with_cpus(request, cpus), nodes):
            return placement
    total = sum(node.get("CPU", 0.0) for node in nodes)
    return _with_cpus(request, _share(min(total / count, MOST_AUTOMATIC_CPUS), 1))


def _with_cpus(request: Request, cpus: float) -> Placement:
    ranks, config = request.ranks, request.config
    if config.name == "colocated":
        places = [(role, rank, rank) for role, count in ranks.items() for rank in range(count)]
    else:
        pairs = [(role, rank) for role, count in ranks.items() for rank in range(count)]
        places = [(role, rank, bundle) for bundle, (role, rank) in enumerate(pairs)]
    threads = config.threads_per_rank or max(1, int(cpus))
    bundles, slots = [], []
    for bundle in range(1 + max(bundle for _, _, bundle in places)):
        tenants = [(role, rank) for role, rank, place in places if place == bundle]
        devices = [role for role, _ in tenants if role in request.on_gpu]
        width = float(request.wide.get(devices[0], 1)) if len(devices) == 1 else 1.0
        bundles.append({"CPU": cpus, "GPU": width} if devices else {"CPU": cpus})
        for role, rank in tenants:
            gpus = _share(width, len(devices)) if role in devices else 0.0
            slots.append(Slot(role, rank, bundle, _share(cpus, len(tenants)), gpus, threads))
    return Placement(tuple(bundles), tuple(slots), config.strategy)


def sorted_by_node(placement: Placement, homes: Mapping[int, str]) -> Placement:
    """Reorders equal bundles by node, so that consecutive ranks of a role share a node where possible.

    Args:
        homes: the node of each bundle, as assigned by Ray.
    """
    nodes = sorted(set(homes.values()))
    moved: dict[int, int] = {}  # bundle in the plan -> bundle of the same size that takes its place
    for kind in {tuple(sorted(bundle.items())) for bundle in placement.bundles}:
        alike = [number for number, bundle in enumerate(placement.bundles) if tuple(sorted(bundle.items())) == kind]
        by_node = sorted(alike, key=lambda number: (nodes.index(homes[number]), number))
        moved.update(zip(alike, by_node, strict=True))
    slots = tuple(replace(slot, bundle=moved[slot.bundle]) for slot in placement.slots)
    return replace(placement, slots=slots)


def _share(amount: float, parts: int) -> float:
    """An equal part, rounded down to 1/1000, which Ray can count, so the parts never exceed the whole."""
    return math.floor(amount / parts * 1000) / 1000


def lacking(placement: Placement, nodes: Nodes) -> list[Mapping[str, float]]:
    """The bundles that do not fit on these nodes under the placement's strategy."""
    if placement.strategy == "STRICT_PACK":
        alone = (_without_place(placement.bundles, [node], one_each=False) for node in nodes)
        return min(alone, key=len, default=list(placement.bundles))
    return _without_place(placement.bundles, nodes, one_each=placement.strategy == "STRICT_SPREAD")


def _without_place(bundles: Sequence[Mapping[str, float]], nodes: Nodes, one_each: bool) -> list[Mapping[str, float]]:
    free = [dict(node) for node in nodes]
    left_over = []
    # Bundles with a GPU go first. Otherwise bundles without a GPU could take the CPUs of the GPU nodes.
    for bundle in sorted(bundles, key=lambda bundle: (-bundle.get("GPU", 0.0), -bundle["CPU"])):
        homes = (node for node in free if all(node.get(kind, 0) > n - SMALLEST for kind, n in bundle.items()))
        home = next(homes, None) if bundle["CPU"] > SMALLEST else None
        if home is None:
            left_over.append(bundle)
        elif one_each:
            free.remove(home)
        else:
            home.update({kind: home[kind] - amount for kind, amount in bundle.items()})
    return left_over


def check_fits(request: Request, placement: Placement, nodes: Nodes) -> None:
    """Refuses a placement that can never fit on these nodes.

    Raises:
        ConfigError: with a table of asked and available resources, and settings that would fit.
    """
    if left_over := lacking(placement, nodes):
        raise ConfigError(f"{_table(placement, nodes, len(left_over))}\n  {_advice(request, placement, nodes)}")


def _table(placement: Placement, nodes: Nodes, left_over: int) -> str:
    strategy = f" with placement.strategy={placement.strategy}" if placement.strategy.startswith("STRICT") else ""
    lines = [f"{left_over} of {len(placement.bundles)} bundles do not fit on the cluster{strategy}", ""]
    lines.append(f"  {'resource':<9} {'asked':>8} {'available':>10}   largest node   largest bundle")
    for kind in ("CPU", "GPU"):
        asked = [bundle.get(kind, 0.0) for bundle in placement.bundles]
        there = [node.get(kind, 0.0) for node in nodes]
        largest = max(there, default=0.0)
        lines.append(f"  {kind:<9} {sum(asked):>8g} {sum(there):>10g}   {largest:>12g}   {max(asked):>14g}")
    roles = ", ".join(f"{role} {len(placement.of(role))}" for role in dict.fromkeys(s.role for s in placement.slots))
    return "\n".join([*lines, "", f"  ranks: {roles}", f"  nodes: {len(nodes)}"])


def _advice(request: Request, placement: Placement, nodes: Nodes) -> str:
    fitting = [" ".join(f"{key}={value}" for key, value in settings.items()) for settings in proposals(request, nodes)]
    if fitting:
        return "Any of these fits: " + "; ".join(fitting)
    largest = {kind: max(bundle.get(kind, 0.0) for bundle in placement.bundles) for kind in ("CPU", "GPU")}
    needs = " and ".join(f"{amount:g} {kind}{'s' if amount != 1 else ''}" for kind, amount in largest.items() if amount)
    return f"No setting alone would fit. Give the cluster a node with at least {needs} that are free"


def proposals(request: Request, nodes: Nodes) -> list[dict[str, object]]:
    """Alternative changes of settings that each make the request fit these nodes, with as few settings as possible."""
    first = [next(filter(None, (_fitting(*change, nodes) for change in kind)), None) for kind in _changes(request)]
    fitting = [settings for settings in first if settings]
    fewest = min(map(len, fitting), default=0)
    return [settings for settings in fitting if len(settings) == fewest]


def _fitting(settings: dict[str, object], changed: Request, nodes: Nodes) -> dict[str, object] | None:
    """The settings if the changed request fits, with smaller bundles if necessary; otherwise None."""
    if settings and not lacking(plan_placement(changed, nodes), nodes):
        return settings
    smaller = plan_placement(replace(changed, config=replace(changed.config, cpus_per_bundle=None)), nodes)
    cpus = smaller.bundles[0]["CPU"]
    if lacking(smaller, nodes) or cpus >= (changed.config.cpus_per_bundle or math.inf):
        return None
    return {**settings, "placement.cpus_per_bundle": f"{cpus:g}"}


def _changes(request: Request) -> Iterator[list[tuple[dict[str, object], Request]]]:
    """Ways to ask for less. Each list is a kind of change, smallest first, as pairs of settings and resulting request."""
    config, ranks = request.config, request.ranks
    yield [({}, request)]
    if config.strategy.startswith("STRICT"):
        yield [({"placement.strategy": "PACK"}, replace(request, config=replace(config, strategy="PACK")))]
    if config.name == "split":
        yield [({"placement": "colocated"}, replace(request, config=replace(config, name="colocated")))]
    if request.on_gpu:
        yield [({"trainer.device": "cpu"}, replace(request, on_gpu=()))]
    yield [
        (
            {key: limit for role, key in RANK_SETTINGS.items() if ranks.get(role, 0) > limit},
            replace(request, ranks={role: min(count, limit) for role, count in ranks.items()}),
        )
        for limit in range(max(ranks.values()) - 1, 0, -1)
    ]


def reserve(request: Request, name: str, timeout_s: float, note: Callable[[str], None]) -> tuple[Placement, Any]:
    """Reserves the bundles of a request; returns the placement and a Ray placement group called `name`.

    Args:
        timeout_s: seconds to wait for resources that others hold.
        note: called every few seconds with a line about the resources awaited and who holds them.

    Raises:
        ConfigError: the bundles can never fit (raised at once), or others still hold the resources after the wait.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    placement = plan_placement(request, nodes)
    check_fits(request, placement, nodes)
    group = ray.util.placement_group([dict(bundle) for bundle in placement.bundles], placement.strategy, name=name)
    deadline = time.monotonic() + timeout_s
    while not group.wait(max(0.1, min(NOTE_EVERY_S, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            held = _held(name)
            ray.util.remove_placement_group(group)
            raise ConfigError(
                f"the bundles of the run could not be reserved in {timeout_s:g} s: {held}. Raise "
                "cluster.reserve_timeout_s to wait longer, or ask for less" + _now_fitting(request)
            )
        note(f"waiting for resources, {max(0.0, deadline - time.monotonic()):.0f} s more at most: {_held(name)}")
    return placement, group


def _now_fitting(request: Request) -> str:
    """Settings that would fit on the resources free at this moment, as the end of a sentence; or empty."""
    import ray

    free = ray._private.state.available_resources_per_node().values()
    fitting = [" ".join(f"{key}={value}" for key, value in change.items()) for change in proposals(request, list(free))]
    return f": the free resources are enough for {' or for '.join(fitting)}" if fitting else ""


def _held(name: str) -> str:
    """Describes what the placement group `name` asks for, what is free, and who holds the rest."""
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    parts, holders = [], []
    rest = {kind: total.get(kind, 0.0) - free.get(kind, 0.0) for kind in ("CPU", "GPU")}
    asked = {"CPU": 0.0, "GPU": 0.0}
    for group in ray.util.placement_group_table().values():
        amounts = {kind: sum(bundle.get(kind, 0.0) for bundle in group["bundles"].values()) for kind in rest}
        if group["name"] == name:
            asked = amounts
        elif group["state"] == "CREATED":
            holders.append(f"{group['name'] or 'a placement group without a name'} holds {_amounts(amounts)}")
            rest = {kind: rest[kind] - amounts[kind] for kind in rest}
    if any(amount > SMALLEST for amount in rest.values()):
        holders.append(f"tasks and actors without a placement group hold {_amounts(rest)}")
    parts.append(f"{_amounts(asked)} asked, {_amounts(free)} of {_amounts(total)} free")
    return "; ".join([*parts, *holders])


def _amounts(resources: Mapping[str, float]) -> str:
    """{"CPU": 2.0, "GPU": 0.0} as '2 CPU'."""
    there = [f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind, 0.0) > SMALLEST]
    return " and ".join(there) or "no CPU"
