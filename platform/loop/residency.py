"""Decides which models are on a device that rollout engines and trained models share.

    generate, evaluate   engines awake, trained models in host memory
    infer, update        trained models on the device, engines asleep
    publish              actor and engine weights on the device; the engine cache follows when sampling begins

The driver announces each change of phase; nothing else in tandem moves a model.
"""

from __future__ import annotations

from tandem.platform.loop.protocols import Roles


class Residency:
    """Moves the models of the roles between phases. Does nothing if every role has its own device."""

    def __init__(self, roles: Roles) -> None:
        self._roles, self._takes_turns = roles, roles.takes_turns
        self._trained = [role for role in (roles.actor, roles.critic, roles.reference) if role is not None]
        # Every role loads its model when it starts, so all models are on the device at first.
        self._on_device, self._awake = True, {"weights", "cache"}

    def sampling(self) -> None:
        """Prepares the engines for sampling."""
        if self._takes_turns:
            self._offload()
            self._wake("weights")
            self._wake("cache")

    def training(self) -> None:
        """Prepares the trained models for inference and updates."""
        if self._takes_turns:
            if self._awake:
                self._roles.rollouts.sleep()
                self._awake = set()
            self._onload()

    def saving(self) -> None:
        """Prepares the trained models for saving. Aborts sampling; the engines cannot be used afterwards."""
        if self._takes_turns:
            self._roles.rollouts.abandon()
            self._awake = set()
            self._onload()

    def syncing(self) -> None:
        """Prepares actor and engines for a weight transfer."""
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
