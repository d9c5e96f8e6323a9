"""Waiting for Ray workers: every wait has a name and a deadline, every failure a role, a rank and a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from tandem.workers.cluster.postmortem import WorkerFailed, is_the_users, last_words

DEATH_IS_SEEN_S = 5.0  # Ray tells of a dead process about as fast as the ranks it was connected to fail
LOOK_S = 5.0  # seconds between looks at ranks that are not waited for
MOST_TOLD = 4  # ranks of whose logs a message shows the end


class WorkerDied(WorkerFailed):
    """A worker's process ended; `role` and `rank` say whose."""

    def __init__(self, text: str, role: str, rank: int) -> None:
        super().__init__(text)
        self.role, self.rank = role, rank


@dataclass(frozen=True)
class Home:
    """Where a worker runs."""

    node: str  # address
    node_id: str = ""
    pid: int | None = None  # None until it has started


class Watch:
    """Looks after ranks while something else is waited for: a rank that dies between its calls would be missed until the
    next one.
    """

    def __init__(self) -> None:
        self.watched: list[Ranks] = []

    def wait_any(self, refs: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        """One of the calls that has ended, if any has in time, and the others.

        Raises:
            WorkerDied: a watched rank has.
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
"""rank -> a new actor in its place, and where it runs; not started yet."""


@dataclass
class Ranks:
    """The Ray actors of one role; those of a role without state of its own can be replaced when they die."""

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
        """The results of one call on each rank, by rank; the first failure of any of them ends the wait.

        Raises:
            WorkerFailed: a rank raised, died, or took more than the deadline (default: cluster.call_timeout_s).
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
        """Raises WorkerDied if one of the other ranks has died: in a collective, the ones that live fail because of it."""
        waiting, deadline = list(others), time.monotonic() + DEATH_IS_SEEN_S
        while waiting and time.monotonic() < deadline:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            for ref in done:
                try:
                    self.result(what, others[ref], ref)
                except WorkerDied:
                    raise
                except Exception:
                    continue  # one more that failed because of it

    def result(self, what: str, rank: int, ref: Any) -> Any:
        """What a call that has ended gave.

        Raises:
            WorkerDied: the process of the rank ended. WorkerFailed: the call raised. ValueError, TrainingError: one of
                tandem's own, as the worker raised it.
        """
        try:
            return ray.get(ref, timeout=self.timeout_s)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if is_the_users(cause):
                raise cause from None
            # As an instance of its cause's class too, a RayTaskError has its traceback in its text alone.
            where = f"\n{getattr(error, 'traceback_str', '') or error}"
            raise WorkerFailed(f"{self.who(rank)} failed in `{what}`: {type(cause).__name__}: {cause}{where}") from error
        except (ActorDiedError, RayActorError) as error:
            text = f"{self.who(rank)} died in `{what}`: {_likely_cause(str(error))}{self._log(rank)}"
            raise WorkerDied(text, self.role, rank) from error
        except (GetTimeoutError, RayError) as error:
            raise WorkerFailed(f"{self.who(rank)} was lost in `{what}`: {type(error).__name__}: {error}") from error

    def look(self) -> None:
        """Raises WorkerDied if a rank has died, also if no call is under way."""
        for rank, handle in enumerate(self.handles):
            if _is_dead(handle):
                raise WorkerDied(f"{self.who(rank)} died: {_likely_cause('')}{self._log(rank)}", self.role, rank)

    def late(self, what: str, ranks: Sequence[int], timeout_s: float) -> WorkerFailed:
        """The failure of ranks that have not answered in time, with what they were doing."""
        told = ranks[:MOST_TOLD]  # in a collective all are late, whichever of them hangs
        more = f" and {len(ranks) - len(told)} more" if len(ranks) > len(told) else ""
        return WorkerFailed(
            f"{', '.join(self.who(rank) for rank in told)}{more} did not finish `{what}` within {timeout_s:g} s. It may "
            "hang, or need longer: look at where it was, or raise cluster.call_timeout_s (cluster.startup_timeout_s for "
            "start)" + "".join(self._log(rank, stacks=True) for rank in told)
        )

    def replace(self, rank: int, death: WorkerDied) -> Any:
        """A new actor in the place of one that died, not started yet.

        Raises:
            WorkerDied: the one given, where it is of another role, the role cannot be replaced, or has been too often.
        """
        if self.spawn is None or death.role != self.role:
            raise death
        if self.restarts >= self.most_restarts:
            limit = f"cluster.max_restarts={self.most_restarts} restarts of {self.role} are used up"
            raise WorkerDied(f"{death}\n{limit}", self.role, rank) from death
        self.restarts += 1
        ray.kill(self.handles[rank])  # one that is only out of reach would keep its share of the bundle
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
        return False  # a head that is gone is told of elsewhere


def _likely_cause(text: str) -> str:
    if "creation task" in text:
        return text
    return (
        "its process ended. The likely cause is that it was killed, most often by the kernel for lack of memory (look for "
        "'Killed process' in dmesg; smaller micro-batches, a higher ZeRO stage or more ranks need less), or it crashed. "
        + (f"Ray says: {' '.join(text.split())[:300]}" if text else "")
    )
