"""Waiting for Ray workers: every wait has a name and a deadline, every failure a role, a rank and a node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError


class WorkerFailed(RuntimeError):
    """A worker died, hung or raised; the text says which, where, doing what, and the likely cause."""


@dataclass(frozen=True)
class Ranks:
    """The Ray actors of one role."""

    role: str
    handles: Sequence[Any]
    nodes: Sequence[str]
    timeout_s: float

    def __len__(self) -> int:
        return len(self.handles)

    def wait(self, what: str, refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The results of one call on each rank, in order of `refs`; the first failure of any of them ends the wait.

        Raises:
            WorkerFailed: a rank raised, died, or took more than the deadline (default: cluster.call_timeout_s).
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                rank = refs.index(waiting[0]) % len(self.handles)
                raise WorkerFailed(
                    f"{self._who(rank)} did not finish `{what}` within {timeout_s:g} s. It may hang, or need longer: "
                    "look at its log, or raise cluster.call_timeout_s (cluster.startup_timeout_s for start)"
                )
            self._raise_failure(what, refs.index(done[0]) % len(self.handles), done[0])
        return list(ray.get(list(refs)))

    def _raise_failure(self, what: str, rank: int, ref: Any) -> None:
        try:
            ray.get(ref, timeout=self.timeout_s)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, ValueError):  # the user's to mend: passed on as it is
                raise cause from None
            # As an instance of its cause's class too, a RayTaskError has its traceback in its text alone.
            where = f"\n{getattr(error, 'traceback_str', '') or error}"
            raise WorkerFailed(f"{self._who(rank)} failed in `{what}`: {type(cause).__name__}: {cause}{where}") from error
        except (ActorDiedError, RayActorError) as error:
            raise WorkerFailed(f"{self._who(rank)} died in `{what}`: {_likely_cause(str(error))}") from error
        except (GetTimeoutError, RayError) as error:
            raise WorkerFailed(f"{self._who(rank)} was lost in `{what}`: {type(error).__name__}: {error}") from error

    def _who(self, rank: int) -> str:
        return f"{self.role} rank {rank} on node {self.nodes[rank]}"


def _likely_cause(text: str) -> str:
    if "creation task" in text:
        return text
    return (
        "its process ended. The likely cause is that it was killed, most often by the kernel for lack of memory (look for "
        "'Killed process' in dmesg; smaller micro-batches, a higher ZeRO stage or more ranks need less), or it crashed. "
        f"Ray says: {' '.join(text.split())[:300]}"
    )
