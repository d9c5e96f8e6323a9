"""The bundle and share of each rank, and the messages for placements that do not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.platform.config.schema import ConfigError, PlacementConfig
from tandem.workers.cluster.placement import (
    SMALLEST,
    Placement,
    Request,
    Slot,
    check_fits,
    lacking,
    plan_placement,
    proposals,
    sorted_by_node,
)

RANKS = {"rollout": 2, "reward": 1, "actor": 2, "critic": 1}


def planned(
    ranks: dict[str, int],
    config: PlacementConfig | None = None,
    on_gpu: Collection[str] = (),
    wide: dict[str, int] | None = None,
    *,
    cpus: float = 0.0,
    nodes: Sequence[Mapping[str, float]] | None = None,
) -> Placement:
    """The placement on `nodes`, by default on one node with `cpus` CPUs and 20 GPUs."""
    request = Request(ranks, config or PlacementConfig(), on_gpu, wide or {})
    return plan_placement(request, [{"CPU": cpus, "GPU": 20.0}] if nodes is None else nodes)


def test_colocated_ranks_share_bundles() -> None:
    placement = planned(RANKS, cpus=8)
    assert placement.bundles == ({"CPU": 4.0}, {"CPU": 4.0})
    assert placement.strategy == "PACK"
    assert placement.of("actor") == [
        Slot("actor", 0, bundle=0, cpus=1.0, gpus=0.0, threads=4),
        Slot("actor", 1, bundle=1, cpus=2.0, gpus=0.0, threads=4),
    ]
    assert [slot.bundle for slot in placement.of("critic")] == [0]


def test_split_gives_each_rank_a_bundle() -> None:
    placement = planned(RANKS, PlacementConfig(name="split", strategy="SPREAD"), cpus=12)
    assert placement.bundles == ({"CPU": 2.0},) * 6
    assert [(slot.role, slot.bundle, slot.cpus, slot.threads) for slot in placement.slots] == [
        ("rollout", 0, 2.0, 2),
        ("rollout", 1, 2.0, 2),
        ("reward", 2, 2.0, 2),
        ("actor", 3, 2.0, 2),
        ("actor", 4, 2.0, 2),
        ("critic", 5, 2.0, 2),
    ]
    assert placement.strategy == "SPREAD"


def test_colocated_roles_share_a_device() -> None:
    placement = planned(RANKS, on_gpu=("rollout", "actor", "critic"), cpus=16)
    assert placement.bundles == ({"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0})
    gpus = {(slot.role, slot.rank): slot.gpus for slot in placement.slots}
    # Three ranks share this device. Shares are rounded down, so their sum never exceeds 1.
    assert gpus[("actor", 0)] == 0.333
    assert gpus[("actor", 1)] == 0.5
    assert gpus[("reward", 0)] == 0.0


def test_split_asks_for_devices_only_where_they_are_used() -> None:
    placement = planned(RANKS, PlacementConfig(name="split"), ("rollout", "actor"), cpus=6)
    assert [bundle.get("GPU", 0) for bundle in placement.bundles] == [1, 1, 0, 1, 1, 0]
    assert {slot.gpus for slot in placement.of("actor")} == {1.0}


def test_an_engine_on_several_devices_has_them_in_its_own_bundle() -> None:
    wide = {"rollout": 4}
    split = planned(RANKS, PlacementConfig(name="split"), ("rollout", "actor"), wide, cpus=6)
    assert [bundle.get("GPU", 0) for bundle in split.bundles] == [4, 4, 0, 1, 1, 0]
    assert {slot.gpus for slot in split.of("rollout")} == {4.0}
    assert {slot.gpus for slot in split.of("actor")} == {1.0}
    assert planned(RANKS, PlacementConfig(name="split"), wide=wide, cpus=6).bundles[0] == {"CPU": 1.0}


@pytest.mark.parametrize(("total", "cpus", "threads"), [(2, 1.0, 1), (1, 0.5, 1), (3, 1.5, 1), (100, 8.0, 8)])
def test_automatic_cpus_are_an_equal_share_of_at_most_eight(total: float, cpus: float, threads: int) -> None:
    placement = planned(RANKS, cpus=total)
    assert placement.bundles == ({"CPU": cpus},) * 2
    assert {slot.threads for slot in placement.slots} == {threads}


def test_cpus_and_threads_can_be_given() -> None:
    config = PlacementConfig(cpus_per_bundle=6.0, threads_per_rank=3)
    placement = planned(RANKS, config, cpus=2)
    assert placement.bundles == ({"CPU": 6.0},) * 2
    assert {slot.threads for slot in placement.slots} == {3}


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    name=st.sampled_from(["colocated", "split"]),
    total=st.floats(0.5, 200),
    gpus=st.integers(0, 5),
)
def test_tenants_never_exceed_their_bundle_nor_bundles_the_cluster(
    counts: list[int], name: str, total: float, gpus: int
) -> None:
    ranks = {f"role{n}": count for n, count in enumerate(counts)}
    placement = planned(ranks, PlacementConfig(name=name), list(ranks)[:gpus], cpus=total)
    assert {role: [slot.rank for slot in placement.of(role)] for role in ranks} == {
        role: list(range(count)) for role, count in ranks.items()
    }
    assert sum(bundle["CPU"] for bundle in placement.bundles) < total + SMALLEST
    assert not lacking(placement, [{"CPU": total, "GPU": 20.0}])
    for number, bundle in enumerate(placement.bundles):
        tenants = [slot for slot in placement.slots if slot.bundle == number]
        assert tenants
        assert sum(slot.cpus for slot in tenants) <= bundle["CPU"] + 1e-9
        assert sum(slot.gpus for slot in tenants) <= bundle.get("GPU", 0.0) + 1e-9


def bundles(*asked: dict[str, float]) -> Placement:
    slots = tuple(Slot("actor", n, n, 1.0, 0.0, 1) for n in range(len(asked)))
    return Placement(asked, slots, "PACK")


def test_what_fits_passes() -> None:
    assert not lacking(bundles({"CPU": 4.0}, {"CPU": 4.0}), [{"CPU": 8.0}])
    assert not lacking(bundles({"CPU": 4.0}, {"CPU": 4.0}), [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}])


@pytest.mark.parametrize("swap", [False, True])
def test_bundles_without_a_device_leave_room_beside_it(swap: bool) -> None:
    asked = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}]
    assert not lacking(bundles(*(asked[::-1] if swap else asked)), [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}])


def test_table_of_what_cannot_fit() -> None:
    request = Request({"actor": 3, "critic": 1}, PlacementConfig(name="split", cpus_per_bundle=2.0), ["actor"])
    nodes = [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}]
    with pytest.raises(ConfigError) as caught:
        check_fits(request, plan_placement(request, nodes), nodes)
    text = str(caught.value)
    assert text.startswith("2 of 4 bundles do not fit on the cluster")
    rows = [line.split() for line in text.splitlines()]
    assert ["CPU", "8", "8", "4", "2"] in rows  # asked, available, largest node, largest bundle
    assert ["GPU", "3", "1", "1", "1"] in rows
    assert "ranks: actor 3, critic 1" in text
    assert text.endswith("Any of these fits: trainer.device=cpu; actor.ranks=1")


ONE_EACH = [{"CPU": 1.0}, {"CPU": 1.0}]


def test_bundles_are_as_large_as_the_nodes_can_hold() -> None:
    assert planned({"actor": 1}, nodes=ONE_EACH).bundles == ({"CPU": 1.0},)
    assert planned({"actor": 3}, nodes=ONE_EACH).bundles == ({"CPU": 0.5},) * 3
    # Two bundles fit on the node with 8 CPUs, and one on the node with 4 CPUs.
    assert planned({"actor": 3}, nodes=[{"CPU": 8.0}, {"CPU": 4.0}]).bundles == ({"CPU": 4.0},) * 3
    strict = PlacementConfig(strategy="STRICT_PACK")
    assert planned({"actor": 2}, strict, nodes=[{"CPU": 8.0}, {"CPU": 4.0}]).bundles == ({"CPU": 4.0},) * 2
    strict = PlacementConfig(strategy="STRICT_SPREAD")
    assert planned({"actor": 2}, strict, nodes=[{"CPU": 8.0}, {"CPU": 2.0}]).bundles == ({"CPU": 2.0},) * 2


@pytest.mark.parametrize(
    ("ranks", "config", "on_gpu", "nodes", "expected"),
    [
        ({"actor": 1}, {"cpus_per_bundle": 2.0}, [], ONE_EACH, [{"placement.cpus_per_bundle": "1"}]),
        (
            {"actor": 2, "critic": 1},
            {"strategy": "STRICT_SPREAD"},
            [],
            [{"CPU": 8.0}],
            [{"placement.strategy": "PACK"}, {"actor.ranks": 1}],
        ),
        (
            {"actor": 1, "critic": 1},
            {"name": "split"},
            ["actor", "critic"],
            [{"CPU": 8.0, "GPU": 1.0}],
            [{"placement": "colocated"}, {"trainer.device": "cpu"}],
        ),
        (
            {"actor": 8, "rollout": 4},
            {},
            ["actor"],
            [{"CPU": 8.0, "GPU": 4.0}] * 2,
            [],
        ),
        (
            {"actor": 16, "rollout": 4},
            {},
            ["actor"],
            [{"CPU": 8.0, "GPU": 2.0}] * 2,
            [{"trainer.device": "cpu"}, {"actor.ranks": 4}],
        ),
        # Suggests two changes if a single change is not enough.
        (
            {"actor": 2},
            {"strategy": "STRICT_SPREAD", "cpus_per_bundle": 16.0},
            [],
            [{"CPU": 8.0}],
            [
                {"placement.strategy": "PACK", "placement.cpus_per_bundle": "4"},
                {"actor.ranks": 1, "placement.cpus_per_bundle": "8"},
            ],
        ),
        ({"actor": 1}, {}, [], [], []),
    ],
)
def test_every_proposal_fits(
    ranks: dict[str, int], config: dict[str, Any], on_gpu: list[str], nodes: Any, expected: list[dict[str, object]]
) -> None:
    request = Request(ranks, PlacementConfig(**config), on_gpu)
    if lacking(plan_placement(request, nodes), nodes):
        assert proposals(request, nodes) == expected
    else:
        assert not expected


def test_what_no_setting_mends() -> None:
    request = Request({"actor": 1}, PlacementConfig(cpus_per_bundle=2.0))
    with pytest.raises(ConfigError, match="1 of 1 bundles do not fit") as caught:
        check_fits(request, plan_placement(request, []), [])
    assert str(caught.value).endswith("Give the cluster a node with at least 2 CPUs that are free")


def test_ranks_of_a_node_stand_side_by_side() -> None:
    placement = planned({"actor": 4}, on_gpu=["actor"], cpus=8)
    found = sorted_by_node(placement, {0: "b", 1: "a", 2: "b", 3: "a"})
    assert [slot.bundle for slot in found.of("actor")] == [1, 3, 0, 2]  # nodes a, a, b, b
    assert found.bundles == placement.bundles


def test_unequal_bundles_keep_their_places() -> None:
    placement = planned({"actor": 2, "reward": 2}, PlacementConfig(name="split"), ["actor"], cpus=8)
    found = sorted_by_node(placement, {0: "b", 1: "a", 2: "b", 3: "a"})
    assert [slot.bundle for slot in found.of("actor")] == [1, 0]
    assert [slot.bundle for slot in found.of("reward")] == [3, 2]
