"""The rollout role over replicas: prompts go where the least work is outstanding, results come as they finish.

A replica that dies is replaced: its prompts are sampled again, by the others or by its successor, which gets the weights of
now before it serves. A response depends on the weights, its prompt and its seed alone, so no sample is lost, doubled or
changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.platform.experience.batch import Prompt, Rollout
from tandem.platform.loop.protocols import Sampling, WeightSyncError
from tandem.workers.cluster.postmortem import WorkerFailed
from tandem.workers.groups.calls import Home, Ranks, WorkerDied
from tandem.workers.groups.facades import ActorGroup, kill
from tandem.workers.sync.transports import Channel

QUEUED = 2  # an engine has so many times what it runs at once: it never waits for the next prompt


@dataclass
class Ticket:
    """Prompts being sampled; `results` by the prompt's place."""

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
        """The most that may have to be computed."""
        sampling = self.ticket.sampling
        return sum(len(self.ticket.prompts[place].ids) + sampling.samples * sampling.max_tokens for place in self.places)

    @property
    def sequences(self) -> int:
        return len(self.places) * self.ticket.sampling.samples


@dataclass(frozen=True)
class _Call:
    """A job that a replica has been given."""

    rank: int
    handle: Any
    job: _Job


class RolloutGroup:
    """The `Rollouts` protocol over replicas.

    Args:
        capacity: sequences that a replica runs at once.
        continuous: whether a replica takes new prompts while it runs others; each then goes alone.
        source: where a replica that replaces another gets its weights from.
        start: starts a new replica, and says where it runs.
        transport: how weights come; `connect` opens it.
        senders: by replica, the rank of the trainer that its weights come from; default the first.
    """

    def __init__(
        self,
        ranks: Ranks,
        capacity: int,
        continuous: bool,
        source: ActorGroup | None = None,
        start: Callable[[int], Home] | None = None,
        transport: str = "shared",
        senders: Sequence[int] | None = None,
    ) -> None:
        self.ranks, self.capacity, self.continuous, self._source, self._start = ranks, capacity, continuous, source, start
        self._senders = [0] * len(ranks) if senders is None else list(senders)
        self._queue: deque[_Job] = deque()
        self._running: dict[Any, _Call] = {}
        self._loading: list[tuple[int, Any]] = []
        self._dead: dict[int, WorkerDied] = {}
        self._stale: set[int] = set()  # replicas that have missed weights
        self._version = 0
        self._transport, self._connected = transport, 0

    def connect(self) -> None:
        """Opens the transport between the trainer and all replicas.

        Raises:
            WorkerFailed: an end did not open; WorkerDied if because its process ended.
        """
        if self._source is None or self._transport == "shared":
            return
        self._connected += 1
        trainer = self._source.ranks
        [address] = trainer.wait("address", [trainer.handles[0].address.remote()])
        # A lost end is noticed before the calls that wait for it are given up.
        timeout_s, size = self.ranks.timeout_s / 4, 1 + len(self.ranks)
        channel = Channel(self._transport, 0, size, address, f"weights-{self._connected}", timeout_s)
        senders = [handle.open_channel.remote(channel) for handle in trainer.handles[: 1 + max(self._senders)]]
        ends = [replace(channel, rank=number + 1) for number in range(len(self.ranks))]
        receivers = [handle.open_channel.remote(end) for handle, end in zip(self.ranks.handles, ends, strict=True)]
        self.ranks.wait("open_channel", receivers)
        trainer.wait("open_channel", senders)
        self._source.is_connected = True

    @property
    def restarts(self) -> int:
        """Replicas that have been replaced so far."""
        return self.ranks.restarts

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Ticket:
        """Queues prompts with the weights of now; returns the ticket for `finished` and `collect`."""
        self._recover()  # one that died asleep has not been replaced yet, and there may be no other
        ticket = Ticket(prompts, sampling)
        size = 1 if self.continuous else max(1, min(self.capacity // sampling.samples, -(-len(prompts) // len(self.ranks))))
        places = range(len(prompts))
        self._queue += [_Job(ticket, tuple(places[start : start + size])) for start in range(0, len(prompts), size)]
        self._dispatch()
        return ticket

    def finished(self, ticket: Ticket) -> Iterator[tuple[int, list[Rollout]]]:
        """(place of a prompt, its samples), each as soon as it is there.

        Raises:
            WorkerFailed: a replica hangs, raised, or died too often.
        """
        given: set[int] = set()
        while True:
            for place in sorted(ticket.results.keys() - given):
                given.add(place)
                yield place, ticket.results[place]
            if ticket.is_complete:
                return
            self._advance()

    def collect(self, ticket: Ticket) -> list[Rollout]:
        """Waits for a ticket: the samples of each prompt side by side, in order of the prompts."""
        results = dict(self.finished(ticket))
        return [rollout for place in sorted(results) for rollout in results[place]]

    def begin_weights(self) -> None:
        """Sees to it that new weights can be sent: replaces dead replicas, and connects those that came since the last.

        Where that fails, because one more is lost, these weights go in the calls, and the next try again.
        """
        self._recover()
        if self._source is not None and not self._source.is_connected:
            try:
                self.connect()
            except WorkerDied as death:
                self._note_death(death)
                self._recover()
            except WorkerFailed:
                pass  # an end that is busy, or lost without a word: told by the next call to it

    def load_weights(self, bucket: Sequence[Any]) -> None:
        """Sends one part of new weights to every replica; the one before must have arrived, so few are on the way."""
        self._settle_loading()
        self._loading = [
            (rank, handle.load_weights.remote(bucket[self._senders[rank]]))
            for rank, handle in enumerate(self.ranks.handles)
            if rank not in self._dead
        ]

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Declares the weights complete; replicas that died or missed a part meanwhile get these weights once more.

        Raises:
            WeightSyncError: a replica does not hold what was sent; names the first tensor.
        """
        self._settle_loading()
        self._version = version
        self._finish(set(range(len(self.ranks))) - self._dead.keys() - self._stale, checksums)
        self._recover()

    def abandon(self) -> None:
        """Ends the replicas, whatever they sample."""
        kill(self.ranks)
        self._queue.clear()
        self._running.clear()

    def sleep(self) -> None:
        """Frees the devices' memory; nothing may be under way."""
        assert not self._running, "replicas that sample cannot sleep"
        self._everywhere("sleep", [handle.sleep.remote() for handle in self.ranks.handles])

    def wake(self, what: str) -> None:
        """Takes it back: first for "weights", then for the "cache"."""
        self._everywhere("wake", [handle.wake.remote(what) for handle in self.ranks.handles])

    def _everywhere(self, call: str, refs: Sequence[Any]) -> None:
        """Waits for all replicas; one that has died is replaced with its next weights, and starts awake."""
        for rank, ref in enumerate(refs):
            self._await(call, rank, ref)

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over replicas."""
        refs = [handle.memory.remote() for handle in self.ranks.handles]
        parts = [self._await("memory", rank, ref) for rank, ref in enumerate(refs)]
        if self._dead:
            self._recover()
            return self.memory()
        return {kind: sum(part[kind] for part in parts) for kind in parts[0]}

    def _advance(self) -> None:
        """Waits for one running call, takes its result, and hands out what is queued."""
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
        """Takes back all that a dead replica had to do, and replaces it unless that has been done."""
        lost = [call.job]
        for ref in [ref for ref, other in self._running.items() if other.handle is call.handle]:
            lost.append(self._running.pop(ref).job)
        self._queue.extendleft(reversed(lost))
        if call.handle is self.ranks.handles[call.rank]:
            self._dead[call.rank] = death
        self._dispatch()  # the others go on while it is replaced
        self._recover()

    def _recover(self) -> None:
        """Replaces the replicas that have died; they, and those that have missed weights, get the ones of now."""
        if not (self._dead or self._stale):
            return
        assert self._start is not None, "replicas that can be spawned can be started"
        assert self._source is not None, "replicas that can be spawned get their weights from somewhere"
        while self._dead or self._stale:
            for rank, death in list(self._dead.items()):
                self.ranks.replace(rank, death)
                try:
                    self.ranks.homes[rank] = self._start(rank)
                except WorkerDied as again:  # `replace` says how often
                    self._note_death(again)
                    continue
                del self._dead[rank]
                self._stale.add(rank)
            for bucket in self._source.weight_buckets(verify=True, shared=True):
                refs = [(rank, self.ranks.handles[rank].load_weights.remote(bucket[0])) for rank in self._stale]
                for rank, ref in refs:
                    self._await("load_weights", rank, ref)
            self._finish(self._stale - self._dead.keys(), self._source.weight_checksums())
            self._stale = set()
        self._source.is_connected = False  # until the next weights: now others may be sampling

    def _finish(self, ranks: Set[int], checksums: Mapping[str, int]) -> None:
        """Declares the weights of these replicas complete, and compares what has arrived."""
        refs = [(rank, self.ranks.handles[rank].finish_weights.remote(self._version)) for rank in sorted(ranks)]
        for rank, ref in refs:
            arrived = self._await("finish_weights", rank, ref)
            if arrived is not None:
                compare_checksums(checksums, arrived, f"rollout replica {rank}")

    def _dispatch(self) -> None:
        """Hands queued jobs, in order, to the replica with the least work outstanding, as far as any has room."""
        while self._queue:
            job = self._queue[0]
            load = {rank: (0, 0) for rank in range(len(self.ranks)) if rank not in self._dead}
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

    def _settle_loading(self) -> None:
        for rank, ref in self._loading:
            if self._await("load_weights", rank, ref) is False:
                self._stale.add(rank)
        self._loading = []

    def _await(self, what: str, rank: int, ref: Any) -> Any:
        """The result of a call; None, and the replica is marked, if it has died."""
        try:
            return self.ranks.wait_for(what, rank, ref)
        except WorkerDied as death:
            self._note_death(death)
            return None

    def _note_death(self, death: WorkerDied) -> None:
        if death.role != self.ranks.role:  # of one that was only watched, or sends the weights
            raise death
        self._dead[death.rank] = death
        self._stale.discard(death.rank)


def compare_checksums(sent: Mapping[str, int], arrived: Mapping[str, int], who: str) -> None:
    """Refuses weights that did not arrive as sent.

    Raises:
        WeightSyncError: names the first tensor that is missing, unexpected or different.
    """
    for name in sorted(sent.keys() | arrived.keys()):
        if name not in arrived or name not in sent:
            raise WeightSyncError(f"{who}: tensor {name} was {'sent' if name in sent else 'received'} on one side only")
        if sent[name] != arrived[name]:
            raise WeightSyncError(f"{who}: tensor {name} has checksum {arrived[name]}, but {sent[name]} was sent")
