"""The rollout role over replicas: prompts go to the replica with the least outstanding work, results come as they finish.

A replica that dies is replaced. Its prompts are sampled again, by the other replicas or by its successor, which receives
the current weights before it serves. A response depends only on the weights, its prompt and its seed, so no sample is
lost, duplicated or changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem.platform.experience.batch import Prompt, Rollout
from tandem.platform.loop.protocols import Sampling
from tandem.workers.cluster.postmortem import WorkerFailed
from tandem.workers.groups.facades import ActorGroup, kill
from tandem.workers.groups.ranks import Home, Ranks, WorkerDied
from tandem.workers.groups.weights import WeightChannel
from tandem.workers.sync.checksums import compare_checksums

QUEUED = 2  # a replica gets up to this many times its capacity, so its engine never waits for the next prompt


class State(Enum):
    """The state of a replica. `RolloutGroup._to` allows only these transitions:

    event                                                    from             to
    its process ends                                         any              DEAD
    a new process replaces it                                DEAD             STALE
    it misses a bucket of weights                            HEALTHY          STALE
    it has received all current weights                      STALE            HEALTHY
    """

    HEALTHY = "healthy"  # holds the current weights
    STALE = "stale"  # alive, but does not hold the current weights
    DEAD = "dead"


@dataclass
class _Replica:
    """One replica as the group sees it."""

    state: State = State.HEALTHY
    death: WorkerDied | None = None  # set while the replica is dead
    loading: Any = None  # while a bucket of weights is being sent to the replica: the reference to the result


@dataclass
class Ticket:
    """Prompts being sampled, and the results so far, keyed by the prompt's index."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    results: dict[int, list[Rollout]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt has its samples."""
        return len(self.results) == len(self.prompts)


@dataclass(frozen=True)
class _Job:
    """Prompts that go to one replica in one call."""

    ticket: Ticket
    places: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """The largest number of tokens this job may need to compute."""
        sampling = self.ticket.sampling
        return sum(len(self.ticket.prompts[place].ids) + sampling.samples * sampling.max_tokens for place in self.places)

    @property
    def sequences(self) -> int:
        return len(self.places) * self.ticket.sampling.samples


@dataclass(frozen=True)
class _Call:
    """A job that a replica is running."""

    rank: int
    handle: Any
    job: _Job


class RolloutGroup:
    """The `Rollouts` protocol over replicas.

    Args:
        capacity: how many sequences a replica runs at once.
        continuous: whether a replica accepts new prompts while it runs others; each call then has one prompt.
        source: the trainer's ranks, which send a new replica its weights.
        start: starts a new replica, and returns where it runs.
        channel: how weights get to the replicas.
    """

    def __init__(
        self,
        ranks: Ranks,
        capacity: int,
        continuous: bool,
        source: ActorGroup | None = None,
        start: Callable[[int], Home] | None = None,
        channel: WeightChannel | None = None,
    ) -> None:
        self.ranks, self.capacity, self.continuous, self._source, self._start = ranks, capacity, continuous, source, start
        self._channel = channel or WeightChannel()
        self._queue: deque[_Job] = deque()
        self._running: dict[Any, _Call] = {}
        self._replicas = [_Replica() for _ in range(len(ranks))]
        self._version = 0

    def connect(self) -> None:
        """Opens the weight channel between the trainer and all replicas.

        Raises:
            WorkerFailed: an end did not open; WorkerDied if its process ended.
        """
        if self._source is not None:
            self._channel.open(self._source.ranks, self.ranks)

    @property
    def restarts(self) -> int:
        """Replicas that have been replaced so far."""
        return self.ranks.restarts

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Ticket:
        """Queues prompts for sampling with the current weights; returns the ticket for `finished` and `collect`."""
        self._recover()  # a replica that died while asleep has not been replaced yet, and may be the only replica
        ticket = Ticket(prompts, sampling)
        size = 1 if self.continuous else max(1, min(self.capacity // sampling.samples, -(-len(prompts) // len(self.ranks))))
        places = range(len(prompts))
        self._queue += [_Job(ticket, tuple(places[start : start + size])) for start in range(0, len(prompts), size)]
        self._dispatch()
        return ticket

    def finished(self, ticket: Ticket) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields (index of a prompt, its samples) as soon as each prompt is finished.

        Raises:
            WorkerFailed: a replica hangs, raised, or died too often.
        """
        yielded: set[int] = set()
        while True:
            for place in sorted(ticket.results.keys() - yielded):
                yielded.add(place)
                yield place, ticket.results[place]
            if ticket.is_complete:
                return
            self._advance()

    def collect(self, ticket: Ticket) -> list[Rollout]:
        """Waits for a ticket, and returns all samples in order of the prompts."""
        results = dict(self.finished(ticket))
        return [rollout for place in sorted(results) for rollout in results[place]]

    def begin_weights(self) -> None:
        """Prepares for new weights: replaces dead replicas and opens the weight channel if it is closed.

        If the channel does not open because an end is lost, these weights travel inside the Ray calls. The channel is tried
        again for the next weights.
        """
        self._recover()
        try:
            self.connect()
        except WorkerDied as death:
            self._note_death(death)
            self._recover()
        except WorkerFailed:
            pass  # an end is busy or lost; the next call to that end reports the failure

    def load_weights(self, bucket: Sequence[Any]) -> None:
        """Sends one bucket of new weights to every replica, once every replica has received the previous bucket."""
        self._await_loading()
        for rank in self._in(State.HEALTHY, State.STALE):
            part = bucket[self._channel.sender_of(rank)]
            self._replicas[rank].loading = self.ranks.handles[rank].load_weights.remote(part)

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Declares the weights complete. A replica that died or missed a bucket meanwhile receives these weights again.

        Raises:
            WeightSyncError: a replica does not hold the weights that were sent; names the first tensor that differs.
        """
        self._await_loading()
        self._version = version
        self._finish(self._in(State.HEALTHY), checksums)
        self._recover()

    def abandon(self) -> None:
        """Ends the replicas, even while they sample."""
        kill(self.ranks)
        self._queue.clear()
        self._running.clear()

    def sleep(self) -> None:
        """Frees the devices' memory; no call may be running."""
        assert not self._running, "replicas that sample cannot sleep"
        self._everywhere("sleep", [handle.sleep.remote() for handle in self.ranks.handles])

    def wake(self, what: str) -> None:
        """Reclaims device memory; call it first for "weights", then for the "cache"."""
        self._everywhere("wake", [handle.wake.remote(what) for handle in self.ranks.handles])

    def _everywhere(self, call: str, refs: Sequence[Any]) -> None:
        """Waits for all replicas. A dead replica is replaced before the next weights; its replacement starts awake."""
        for rank, ref in enumerate(refs):
            self._await(call, rank, ref)

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over replicas."""
        refs = [handle.memory.remote() for handle in self.ranks.handles]
        parts = [self._await("memory", rank, ref) for rank, ref in enumerate(refs)]
        if self._in(State.DEAD):
            self._recover()
            return self.memory()
        return {kind: sum(part[kind] for part in parts) for kind in parts[0]}

    def _advance(self) -> None:
        """Waits for one running call, stores its result, and dispatches queued jobs."""
        deadline = self.ranks.timeout_s
        assert self._running, "what is queued has been handed out"
        done, _ = self.ranks.watch.wait_any(list(self._running), deadline)
        if not done:
            raise self.ranks.late("generate", sorted({call.rank for call in self._running.values()}), deadline)
        call = self._running.pop(done[0])
        try:
            rollouts = self.ranks.result("generate", call.rank, done[0])
        except WorkerDied as death:
            self._bury(call, death)
        else:
            job, samples = call.job, call.job.ticket.sampling.samples
            for number, place in enumerate(job.places):
                job.ticket.results[place] = rollouts[number * samples : (number + 1) * samples]
        self._dispatch()

    def _bury(self, call: _Call, death: WorkerDied) -> None:
        """Queues all jobs of a dead replica again, and replaces the replica unless that has happened already."""
        lost = [call.job]
        for ref in [ref for ref, other in self._running.items() if other.handle is call.handle]:
            lost.append(self._running.pop(ref).job)
        self._queue.extendleft(reversed(lost))
        if call.handle is self.ranks.handles[call.rank]:
            self._to(State.DEAD, call.rank, death)
        self._dispatch()  # the other replicas sample while this one is replaced
        self._recover()

    def _recover(self) -> None:
        """Makes every replica healthy: starts a new process for each dead replica, and sends stale replicas the weights."""
        if not self._in(State.DEAD, State.STALE):
            return
        assert self._start is not None, "replicas that can be spawned can be started"
        assert self._source is not None, "replicas that can be spawned receive their weights from the trainer"
        while self._in(State.DEAD, State.STALE):
            for rank in self._in(State.DEAD):
                self._restart(rank)
            if stale := self._in(State.STALE):
                self._send_again(stale)
        self._channel.close()  # until the next weights, because opening waits for all replicas and some may be sampling

    def _restart(self, rank: int) -> None:
        """Starts a new process for a dead replica. If the new process dies too, the replica stays dead.

        Raises:
            WorkerDied: no restarts are left.
        """
        assert self._start is not None, "checked by `_recover`"
        death = self._replicas[rank].death
        assert death is not None, "a dead replica has a death"
        self.ranks.replace(rank, death)
        try:
            self.ranks.homes[rank] = self._start(rank)
        except WorkerDied as again:
            self._note_death(again)
        else:
            self._to(State.STALE, rank)

    def _send_again(self, ranks: Sequence[int]) -> None:
        """Sends the current weights to these replicas inside the Ray calls; replicas that survive become healthy."""
        assert self._source is not None, "checked by `_recover`"
        for bucket in self._source.weight_buckets(verify=True, shared=True):
            refs = {rank: self.ranks.handles[rank].load_weights.remote(bucket[0]) for rank in ranks if self._is_stale(rank)}
            for rank, ref in refs.items():
                self._await("load_weights", rank, ref)
        self._finish([rank for rank in ranks if self._is_stale(rank)], self._source.weight_checksums())
        for rank in filter(self._is_stale, ranks):
            self._to(State.HEALTHY, rank)

    def _finish(self, ranks: Sequence[int], checksums: Mapping[str, int]) -> None:
        """Declares the weights of these replicas complete, and compares the checksums."""
        refs = [(rank, self.ranks.handles[rank].finish_weights.remote(self._version)) for rank in ranks]
        for rank, ref in refs:
            arrived = self._await("finish_weights", rank, ref)
            if arrived is not None:
                compare_checksums(checksums, arrived, f"rollout replica {rank}")

    def _dispatch(self) -> None:
        """Gives each queued job, in order, to the replica with the least outstanding work, while any replica has room."""
        while self._queue:
            job = self._queue[0]
            load = dict.fromkeys(self._in(State.HEALTHY, State.STALE), (0, 0))
            for call in self._running.values():
                if call.rank in load and call.handle is self.ranks.handles[call.rank]:
                    tokens, sequences = load[call.rank]
                    load[call.rank] = tokens + call.job.tokens, sequences + call.job.sequences
            room = [rank for rank, (_, busy) in load.items() if not busy or busy + job.sequences <= QUEUED * self.capacity]
            if not room:
                return
            rank = min(room, key=lambda rank: load[rank])
            self._queue.popleft()
            prompts = [job.ticket.prompts[place] for place in job.places]
            handle = self.ranks.handles[rank]
            self._running[handle.generate.remote(prompts, job.ticket.sampling)] = _Call(rank, handle, job)

    def _await_loading(self) -> None:
        """Waits for the bucket in transit; a replica that missed the bucket becomes stale."""
        for rank, replica in enumerate(self._replicas):
            ref, replica.loading = replica.loading, None
            if ref is not None and self._await("load_weights", rank, ref) is False:
                self._to(State.STALE, rank)

    def _await(self, what: str, rank: int, ref: Any) -> Any:
        """The result of a call; if the replica has died, marks it as dead and returns None."""
        try:
            return self.ranks.wait_for(what, rank, ref)
        except WorkerDied as death:
            self._note_death(death)
            return None

    def _note_death(self, death: WorkerDied) -> None:
        if death.role != self.ranks.role:  # a role that is only watched, or that sends the weights
            raise death
        self._to(State.DEAD, death.rank, death)

    def _in(self, *states: State) -> list[int]:
        """The ranks of the replicas in one of these states, in order."""
        return [rank for rank, replica in enumerate(self._replicas) if replica.state in states]

    def _is_stale(self, rank: int) -> bool:
        return self._replicas[rank].state is State.STALE

    def _to(self, state: State, rank: int, death: WorkerDied | None = None) -> None:
        """Changes the state of a replica, as far as the table in `State` allows."""
        replica = self._replicas[rank]
        allowed = {State.STALE: (State.DEAD, State.HEALTHY, State.STALE), State.HEALTHY: (State.STALE,)}
        assert state is State.DEAD or replica.state in allowed[state], f"replica {rank}: {replica.state} to {state}"
        replica.state, replica.death = state, death
