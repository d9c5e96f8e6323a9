"""When engines and trained models move on and off a device that they share."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.platform.loop.protocols import Roles
from tandem.platform.loop.residency import Residency


class Mover:
    """Records when it is moved."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def offload(self) -> None:
        self.log.append(f"{self.name} off")

    def onload(self) -> None:
        self.log.append(f"{self.name} on")

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self, what: str) -> None:
        self.log.append(f"wake {what}")


def make(takes_turns: bool = True, critic: bool = True) -> tuple[Residency, list[str]]:
    log: list[str] = []
    own: dict[str, Any] = {"actor": Mover("actor", log), "rollouts": Mover("rollouts", log), "rewards": None}
    if critic:
        own |= {"critic": Mover("critic", log)}
    return Residency(Roles(**own, takes_turns=takes_turns)), log


def test_a_step_in_its_order() -> None:
    residency, log = make()
    residency.syncing()  # first weights: the cache makes room for the actor that sends them
    assert log == ["sleep", "wake weights"]
    log.clear()
    residency.sampling()
    assert log == ["actor off", "critic off", "wake cache"]
    log.clear()
    residency.training()
    assert log == ["sleep", "actor on", "critic on"]
    log.clear()
    residency.syncing()
    assert log == ["wake weights"]  # staged: the cache is never on the device together with the trained models


def test_a_step_without_new_weights_wakes_all() -> None:
    residency, log = make(critic=False)
    residency.training()
    log.clear()
    residency.sampling()
    assert log == ["actor off", "wake weights", "wake cache"]


@pytest.mark.parametrize("phase", ["sampling", "training", "syncing"])
def test_nothing_is_moved_twice(phase: str) -> None:
    residency, log = make()
    getattr(residency, phase)()
    log.clear()
    getattr(residency, phase)()
    assert log == []


def test_roles_with_devices_of_their_own_stay() -> None:
    residency, log = make(takes_turns=False)
    for _ in range(2):
        residency.syncing()
        residency.sampling()
        residency.training()
    assert log == []
