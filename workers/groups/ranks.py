"""Waits for Ray workers. Every wait has a name and a deadline; every failure names a role, a rank and a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from tandem.workers.cluster.postmortem import WorkerFailed, is_the_users, last_words

DEATH_IS_SEEN_S = 5.0  # the ranks connected to a dead process may fail before Ray reports the death
LOOK_S = 5.0  # seconds between checks of ranks without a call in progress
MOST_TOLD = 4  # a message shows the log tails of at most this many ranks


class WorkerDied(WorkerFailed):
    """The process of a worker ended; `role` and `rank` identify the worker."""

    def __init__(self, text: str, role: str, rank: int) -> None:
        super().__init__(text)
        self.role, self.rank = role, rank


@dataclass(frozen=True)
class Home:
    """The node and process of a worker."""

    node: str  # address
    node_id: str = ""
    pid: int | None = None  # None until the worker has started


class Watch:
    """Checks idle ranks while the driver waits for other calls.

    Without these checks, a rank that dies between two of its calls would go unnoticed until the next call.
    """

    def __init__(self) -> None:
        self.watched: list[Ranks] = []

    def wait_any(self, refs: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        """One finished call, or none if none finishes in time, and the remaining calls.

        Raises:
            WorkerDied: a watched rank died.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            done, waiting = ray.wait(list(refs), num_returns=1, timeout=max(0.0, min(left, LOOK_S)))
            if done or left <= LOOK_S:
                return done, waiting
            for ranks in self.watched:
                ranks.look()


Spawn = Callable[[int], tuple[Any, Home]]
"""rank -> a new actor for this rank, not started yet, and its home."""


@dataclass
class Ranks:
    """The Ray actors of one role. Actors of a stateless role can be replaced when they die."""

    role: str
    handles: list[Any]
    homes: list[Home]
    timeout_s: float
    spawn: Spawn | None = None
    most_restarts: int = 0
    watch: Watch = field(default_factory=Watch)
    restarts: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self.handles)

    def wait(self, what: str, refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The results of one call on each rank, in order of rank; the first failure ends the wait.

        Raises:
            WorkerFailed: a rank raised, died, or missed the deadline (default: cluster.call_timeout_s).
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        places, results = {ref: place for place, ref in enumerate(refs)}, {}
        waiting = list(refs)
        while waiting:
            done, waiting = self.watch.wait_any(waiting, deadline - time.monotonic())
            if not done:
                raise self.late(what, sorted(places[ref] for ref in waiting), timeout_s)
            try:
                results[done[0]] = self.result(what, places[done[0]], done[0])
            except WorkerDied:
                raise
            except WorkerFailed:
                self._raise_a_death(what, {ref: places[ref] for ref in waiting})
                raise
        return [results[ref] for ref in refs]

    def wait_for(self, what: str, rank: int, ref: Any, timeout_s: float | None = None) -> Any:
        """The result of a call on one rank; raises as `wait` does."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        done, _ = self.watch.wait_any([ref], timeout_s)
        if not done:
            raise self.late(what, [rank], timeout_s)
        return self.result(what, rank, ref)

    def _raise_a_death(self, what: str, others: dict[Any, int]) -> None:
        """Raises WorkerDied if another rank has died: in a collective operation, its death makes the live ranks fail."""
        waiting, deadline = list(others), time.monotonic() + DEATH_IS_SEEN_S
        while waiting and time.monotonic() < deadline:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            for ref in done:
                try:
                    self.result(what, others[ref], ref)
                except WorkerDied:
                    raise
                except Exception:
                    continue  # another rank that failed because of the death

    def result(self, what: str, rank: int, ref: Any) -> Any:
        """The result of a call that has ended.

        Raises:
            WorkerDied: the process of the rank ended. WorkerFailed: the call raised. ValueError, TrainingError: the worker
                raised one of tandem's own subclasses, which passes through unchanged.
        """
        try:
            return ray.get(ref, timeout=self.timeout_s)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if is_the_users(cause):
                raise cause from None
            # A RayTaskError that is also an instance of its cause's class has its traceback only in its text.
            where = f"\n{getattr(error, 'traceback_str', '') or error}"
            raise WorkerFailed(f"{self.who(rank)} failed in `{what}`: {type(cause).__name__}: {cause}{where}") from error
        except (ActorDiedError, RayActorError) as error:
            text = f"{self.who(rank)} died in `{what}`: {_likely_cause(str(error))}{self._log(rank)}"
            raise WorkerDied(text, self.role, rank) from error
        except (GetTimeoutError, RayError) as error:
            raise WorkerFailed(f"{self.who(rank)} was lost in `{what}`: {type(error).__name__}: {error}") from error

    def look(self) -> None:
        """Raises WorkerDied if a rank has died, even without a call in progress."""
        for rank, handle in enumerate(self.handles):
            if _is_dead(handle):
                raise WorkerDied(f"{self.who(rank)} died: {_likely_cause('')}{self._log(rank)}", self.role, rank)

    def late(self, what: str, ranks: Sequence[int], timeout_s: float) -> WorkerFailed:
        """The error for ranks that missed a deadline, with their log tails and stacks."""
        told = ranks[:MOST_TOLD]  # in a collective operation, one rank that hangs makes all ranks late
        more = f" and {len(ranks) - len(told)} more" if len(ranks) > len(told) else ""
        return WorkerFailed(
            f"{', '.join(self.who(rank) for rank in told)}{more} did not finish `{what}` within {timeout_s:g} s. It may "
            "hang or need more time: see its stacks below, or raise cluster.call_timeout_s (cluster.startup_timeout_s for "
            "start)" + "".join(self._log(rank, stacks=True) for rank in told)
        )

    def replace(self, rank: int, death: WorkerDied) -> Any:
        """Replaces a dead actor; returns the new actor, not started yet.

        Raises:
            WorkerDied: `death` is of another role, actors of this role cannot be replaced, or no restarts are left.
        """
        if self.spawn is None or death.role != self.role:
            raise death
        if self.restarts >= self.most_restarts:
            limit = f"cluster.max_restarts={self.most_restarts} restarts of {self.role} are used up"
            raise WorkerDied(f"{death}\n{limit}", self.role, rank) from death
        self.restarts += 1
        ray.kill(self.handles[rank])  # an actor that is only unreachable would keep its share of the bundle
        self.handles[rank], self.homes[rank] = self.spawn(rank)
        return self.handles[rank]

    def who(self, rank: int) -> str:
        """Role, rank and node, for messages."""
        return f"{self.role} rank {rank} on node {self.homes[rank].node}"

    def _log(self, rank: int, stacks: bool = False) -> str:
        home = self.homes[rank]
        return "" if home.pid is None else last_words(home.node_id, home.pid, stacks)


def _is_dead(handle: Any) -> bool:
    """Whether Ray knows that the actor's process has ended."""
    try:
        return bool(ray._private.state.actors(handle._actor_id.hex()).get("State") == "DEAD")
    except Exception:
        return False  # `RayWatch` reports a lost head


def _likely_cause(text: str) -> str:
    if "creation task" in text:
        return text
    return (
        "its process ended. The likely cause is that it was killed, most often by the kernel for lack of memory (look for "
        "'Killed process' in dmesg; smaller micro-batches, a higher ZeRO stage or more ranks need less), or it crashed. "
        + (f"Ray says: {' '.join(text.split())[:300]}" if text else "")
    )
