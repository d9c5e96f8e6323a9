"""Which rank sits in which bundle, with how much of it, and what is said when it cannot fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.platform.config import ConfigError, PlacementConfig
from tandem.workers.placement import SMALLEST, Placement, Slot, check_fits, plan_placement, sorted_by_node

RANKS = {"rollout": 2, "reward": 1, "actor": 2, "critic": 1}


def test_colocated_ranks_share_bundles() -> None:
    placement = plan_placement(RANKS, (), PlacementConfig(), total_cpus=8)
    assert placement.bundles == ({"CPU": 4.0}, {"CPU": 4.0})
    assert placement.strategy == "PACK"
    assert placement.of("actor") == [
        Slot("actor", 0, bundle=0, cpus=1.0, gpus=0.0, threads=4),
        Slot("actor", 1, bundle=1, cpus=2.0, gpus=0.0, threads=4),
    ]
    assert [slot.bundle for slot in placement.of("critic")] == [0]


def test_split_gives_each_rank_a_bundle() -> None:
    placement = plan_placement(RANKS, (), PlacementConfig(name="split", strategy="SPREAD"), total_cpus=12)
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
    placement = plan_placement(RANKS, ("rollout", "actor", "critic"), PlacementConfig(), total_cpus=16)
    assert placement.bundles == ({"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0})
    gpus = {(slot.role, slot.rank): slot.gpus for slot in placement.slots}
    assert gpus[("actor", 0)] == 0.333  # three share; rounded down, so they never exceed the device
    assert gpus[("actor", 1)] == 0.5
    assert gpus[("reward", 0)] == 0.0


def test_split_asks_for_devices_only_where_they_are_used() -> None:
    placement = plan_placement(RANKS, ("rollout", "actor"), PlacementConfig(name="split"), total_cpus=6)
    assert [bundle.get("GPU", 0) for bundle in placement.bundles] == [1, 1, 0, 1, 1, 0]
    assert {slot.gpus for slot in placement.of("actor")} == {1.0}


def test_an_engine_on_several_devices_has_them_in_its_own_bundle() -> None:
    wide = {"rollout": 4}
    split = plan_placement(RANKS, ("rollout", "actor"), PlacementConfig(name="split"), 6, wide)
    assert [bundle.get("GPU", 0) for bundle in split.bundles] == [4, 4, 0, 1, 1, 0]
    assert {slot.gpus for slot in split.of("rollout")} == {4.0}
    assert {slot.gpus for slot in split.of("actor")} == {1.0}
    assert plan_placement(RANKS, (), PlacementConfig(name="split"), 6, wide).bundles[0] == {"CPU": 1.0}


@pytest.mark.parametrize(("total", "cpus", "threads"), [(2, 1.0, 1), (1, 0.5, 1), (3, 1.5, 1), (100, 8.0, 8)])
def test_automatic_cpus_are_an_equal_share_of_at_most_eight(total: float, cpus: float, threads: int) -> None:
    placement = plan_placement(RANKS, (), PlacementConfig(), total_cpus=total)
    assert placement.bundles == ({"CPU": cpus},) * 2
    assert {slot.threads for slot in placement.slots} == {threads}


def test_cpus_and_threads_can_be_given() -> None:
    config = PlacementConfig(cpus_per_bundle=6.0, threads_per_rank=3)
    placement = plan_placement(RANKS, (), config, total_cpus=2)
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
    placement = plan_placement(ranks, list(ranks)[:gpus], PlacementConfig(name=name), total)
    assert {role: [slot.rank for slot in placement.of(role)] for role in ranks} == {
        role: list(range(count)) for role, count in ranks.items()
    }
    assert sum(bundle["CPU"] for bundle in placement.bundles) < total + SMALLEST
    check_fits(placement, [{"CPU": total, "GPU": 20.0}])
    for number, bundle in enumerate(placement.bundles):
        tenants = [slot for slot in placement.slots if slot.bundle == number]
        assert tenants
        assert sum(slot.cpus for slot in tenants) <= bundle["CPU"] + 1e-9
        assert sum(slot.gpus for slot in tenants) <= bundle.get("GPU", 0.0) + 1e-9


def bundles(*asked: dict[str, float]) -> Placement:
    slots = tuple(Slot("actor", n, n, 1.0, 0.0, 1) for n in range(len(asked)))
    return Placement(asked, slots, "PACK")


def test_what_fits_passes() -> None:
    check_fits(bundles({"CPU": 4.0}, {"CPU": 4.0}), [{"CPU": 8.0}])
    check_fits(bundles({"CPU": 4.0}, {"CPU": 4.0}), [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}])


@pytest.mark.parametrize("swap", [False, True])
def test_bundles_without_a_device_leave_room_beside_it(swap: bool) -> None:
    asked = [{"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}]
    check_fits(bundles(*(asked[::-1] if swap else asked)), [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}])


def test_table_of_what_cannot_fit() -> None:
    placement = plan_placement({"actor": 3, "critic": 1}, ("actor",), PlacementConfig(name="split"), total_cpus=8)
    with pytest.raises(ConfigError) as caught:
        check_fits(placement, [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}])
    text = str(caught.value)
    assert text.startswith("2 of 4 bundles do not fit on the cluster")
    rows = [line.split() for line in text.splitlines()]
    assert ["CPU", "8", "8", "4", "2"] in rows  # asked, available, largest node, largest bundle
    assert ["GPU", "3", "1", "1", "1"] in rows
    assert "ranks: actor 3, critic 1" in text
    for key in ("actor.ranks", "critic.ranks", "rollout.replicas", "placement.cpus_per_bundle", "placement=colocated"):
        assert key in text


def test_bundle_larger_than_any_node() -> None:
    with pytest.raises(ConfigError, match="1 of 1 bundles do not fit"):
        check_fits(bundles({"CPU": 8.0}), [{"CPU": 4.0}, {"CPU": 4.0}])


def test_cluster_without_nodes() -> None:
    with pytest.raises(ConfigError, match="1 of 1 bundles do not fit"):
        check_fits(bundles({"CPU": 1.0}), [])


def test_ranks_of_a_node_stand_side_by_side() -> None:
    placement = plan_placement({"actor": 4}, ["actor"], PlacementConfig(), 8.0)
    found = sorted_by_node(placement, {0: "b", 1: "a", 2: "b", 3: "a"})
    assert [slot.bundle for slot in found.of("actor")] == [1, 3, 0, 2]  # nodes a, a, b, b
    assert found.bundles == placement.bundles


def test_unequal_bundles_keep_their_places() -> None:
    placement = plan_placement({"actor": 2, "reward": 2}, ["actor"], PlacementConfig(name="split"), 8.0)
    found = sorted_by_node(placement, {0: "b", 1: "a", 2: "b", 3: "a"})
    assert [slot.bundle for slot in found.of("actor")] == [1, 0]
    assert [slot.bundle for slot in found.of("reward")] == [3, 2]
