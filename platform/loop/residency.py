"""Who holds the device when: engines and trained models take turns where they share one.

    generate, evaluate   engines awake, trained models in host memory
    infer, update        trained models on the device, engines asleep
    publish              the actor on the device, and of the engines their weights; their cache follows when they sample

The driver says which of the three begins; nothing else in tandem moves a model.
"""

from __future__ import annotations

from tandem.platform.loop.protocols import Roles


class Residency:
    """Moves the roles' models between the phases; does nothing where every role has a device of its own."""

    def __init__(self, roles: Roles) -> None:
        self._roles, self._takes_turns = roles, roles.takes_turns
        self._trained = [role for role in (roles.actor, roles.critic, roles.reference) if role is not None]
        # Every role loads its model when it starts, so all are there at first.
        self._on_device, self._awake = True, {"weights", "cache"}

    def sampling(self) -> None:
        """Engines may sample from here on."""
        if self._takes_turns:
            self._offload()
            self._wake("weights")
            self._wake("cache")

    def training(self) -> None:
        """Trained models may be used from here on."""
        if self._takes_turns:
            if self._awake:
                self._roles.rollouts.sleep()
                self._awake = set()
            self._onload()

    def saving(self) -> None:
        """Trained models may be used from here on, and engines no more: what they sample is given up."""
        if self._takes_turns:
            self._roles.rollouts.abandon()
            self._awake = set()
            self._onload()

    def syncing(self) -> None:
        """Weights may go from the actor to the engines from here on."""
        if self._takes_turns:
            if "cache" in self._awake:
                self._roles.rollouts.sleep()
                self._awake = set()
            self._onload()
            self._wake("weights")

    def _wake(self, what: str) -> None:
        if what not in self._awake:
            self._roles.rollouts.wake(what)
            self._awake.add(what)

    def _offload(self) -> None:
        if self._on_device:
            for role in self._trained:
                role.offload()
            self._on_device = False

    def _onload(self) -> None:
        if not self._on_device:
            for role in self._trained:
                role.onload()
            self._on_device = True
