"""Typed facades over the Ray actors of each role: split a batch over the ranks, call, gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from tandem.platform.experience.batch import Rollout, RolloutBatch, Score, TrainBatch, Values
from tandem.platform.experience.partition import balance
from tandem.platform.loop.metrics import add_totals
from tandem.platform.loop.protocols import Facts, Totals
from tandem.workers.groups.ranks import Home, Ranks, WorkerDied
from tandem.workers.groups.weights import WeightChannel
from tandem.workers.sync.transports import ObjectStore


class _Group:
    """The ranks of a role."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over ranks."""
        parts = self.ranks.wait("memory", [rank.memory.remote() for rank in self.ranks.handles])
        return {kind: sum(part[kind] for part in parts) for kind in parts[0]}


class _ResidentGroup(_Group):
    """The ranks of a role with a model that can leave its device."""

    def offload(self) -> None:
        """Moves the models to host memory."""
        self.ranks.wait("offload", [rank.offload.remote() for rank in self.ranks.handles])

    def onload(self) -> None:
        """Moves the models back to their devices."""
        self.ranks.wait("onload", [rank.onload.remote() for rank in self.ranks.handles])


class _TrainedGroup(_ResidentGroup):
    """The `Trained` protocol over data-parallel ranks."""

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """One optimizer step per mini-batch, in order."""
        shares = self._shares(minibatches)
        refs = [rank.update.remote(share) for rank, share in zip(self.ranks.handles, shares, strict=True)]
        return add_totals(self.ranks.wait("update", refs))

    def _shares(self, minibatches: Sequence[TrainBatch]) -> list[list[TrainBatch]]:
        """For each rank, its part of every mini-batch."""
        shares: list[list[TrainBatch]] = [[] for _ in self.ranks.handles]
        for minibatch in minibatches:
            rows = balance(minibatch.rollout.lengths.tolist(), len(self.ranks))
            for share, part in zip(shares, rows, strict=True):
                share.append(minibatch.select(part) if part else minibatch.blank())
        return shares

    def state_parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Yields the weights and the optimizer state in parts: unsharded tensors by name."""
        [count, *_] = self.ranks.wait("begin_state", [rank.begin_state.remote() for rank in self.ranks.handles])
        for _ in range(count):
            [part, *_] = self.ranks.wait("next_state", [rank.next_state.remote() for rank in self.ranks.handles])
            yield part.unpack()

    def state_facts(self) -> list[Facts]:
        """One entry per rank: its optimizer steps so far, and the states of its random generators."""
        facts = self.ranks.wait("state_facts", [rank.state_facts.remote() for rank in self.ranks.handles])
        return [fact for [fact] in facts]

    def load_state(self, parts: Iterable[Mapping[str, Tensor]], facts: Sequence[Facts]) -> None:
        """Restores the results of `state_parts` and `state_facts`; the number of ranks may differ."""
        self.ranks.wait("begin_load", [rank.begin_load.remote(list(facts)) for rank in self.ranks.handles])
        for part in parts:
            packed = ray.put(ObjectStore().send(dict(part)))
            self.ranks.wait("load_part", [rank.load_part.remote(packed) for rank in self.ranks.handles])
        self.ranks.wait("end_load", [rank.end_load.remote() for rank in self.ranks.handles])


class ActorGroup(_TrainedGroup):
    """The `Actor` protocol over data-parallel ranks.

    Args:
        channel: how weights get to the replicas; shared with the rollout group.
    """

    def __init__(self, ranks: Ranks, channel: WeightChannel | None = None) -> None:
        super().__init__(ranks)
        self._channel = channel or WeightChannel()

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs of the sampled tokens at the sampling temperature."""
        return _logprobs(self.ranks, batch)

    def gradient_noise(self, halves: Sequence[TrainBatch]) -> Totals:
        """How much the gradients of the two halves of a batch differ; changes no weights."""
        shares = self._shares(halves)
        refs = [rank.gradient_noise.remote(share) for rank, share in zip(self.ranks.handles, shares, strict=True)]
        return add_totals(self.ranks.wait("gradient_noise", refs))

    def weight_buckets(self, verify: bool = True, shared: bool = False) -> Iterator[Sequence[Any]]:
        """Yields the weights in buckets, each as one Ray reference per rank; the tensors do not pass through this process.

        Args:
            shared: sends the weights inside the Ray calls, even if the channel is open.
        """
        in_calls = shared or not self._channel.is_open
        refs = [rank.begin_export.remote(verify, in_calls) for rank in self.ranks.handles]
        [count, *_] = self.ranks.wait("begin_export", refs)
        for _ in range(count):
            refs = [rank.next_bucket.remote() for rank in self.ranks.handles]
            yield refs
            self.ranks.wait("next_bucket", refs)
        self.ranks.wait("end_export", [self.ranks.handles[0].end_export.remote()])

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of every tensor of the last `weight_buckets`; empty if called with verify=False."""
        [checksums] = self.ranks.wait("weight_checksums", [self.ranks.handles[0].weight_checksums.remote()])
        return dict(checksums)


class ReferenceGroup(_ResidentGroup):
    """The `Reference` protocol over independent ranks."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs of the sampled tokens, as `ActorGroup.logprobs`."""
        return _logprobs(self.ranks, batch)


class CriticGroup(_TrainedGroup):
    """The `Critic` protocol over data-parallel ranks."""

    def values(self, batch: RolloutBatch) -> Values:
        """The value of every prefix."""
        rows = balance(batch.lengths.tolist(), len(self.ranks))
        refs = [rank.values.remote(part) for rank, part in zip(self.ranks.handles, batch.split(rows), strict=True)]
        parts = self.ranks.wait("values", refs)
        return Values(in_order(rows, [part.values for part in parts]), in_order(rows, [part.final for part in parts]))


class RewardGroup(_Group):
    """The `Rewards` protocol over one worker, which has its own processes. A worker that dies is replaced.

    Args:
        start: starts a new worker, and returns where it runs.
    """

    def __init__(self, ranks: Ranks, start: Callable[[int], Home] | None = None) -> None:
        super().__init__(ranks)
        self._start = start

    @property
    def restarts(self) -> int:
        """Workers that have been replaced so far."""
        return self.ranks.restarts

    def submit(self, rollouts: Sequence[Rollout]) -> Any:
        """Starts scoring; returns a ticket for `collect`."""
        return self._submit("score", rollouts)

    def _submit(self, method: str, rollouts: Sequence[Rollout]) -> tuple[str, list[Rollout], Any]:
        return method, list(rollouts), getattr(self.ranks.handles[0], method).remote(list(rollouts))

    def collect(self, ticket: Any) -> list[Score]:
        """One score per rollout of the ticket, in order. If the worker dies, a new worker scores the rollouts again."""
        method, rollouts, ref = ticket
        while True:
            owner = self.ranks.handles[0]
            try:
                return list(self.ranks.wait_for(method, 0, ref))
            except WorkerDied as death:
                if death.role != self.ranks.role:
                    raise
                if owner is self.ranks.handles[0] and not self._is_alive(owner):
                    self._replace(death)
                _, _, ref = self._submit(method, rollouts)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order; its parts include the verifier's result."""
        return self.collect(self._submit("verify", rollouts))

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""
        try:
            return super().memory()
        except WorkerDied as death:
            self._replace(death)
            return super().memory()

    def _is_alive(self, handle: Any) -> bool:
        """Whether the worker answers. If it does, the reported death was that of its predecessor."""
        try:
            self.ranks.wait_for("memory", 0, handle.memory.remote())
        except WorkerDied as death:
            if death.role != self.ranks.role:
                raise
            return False
        return True

    def _replace(self, death: WorkerDied) -> None:
        assert self._start is not None, "a worker that can be spawned can be started"
        while True:
            self.ranks.replace(0, death)  # raises when no restarts are left
            try:
                self.ranks.homes[0] = self._start(0)
                return
            except WorkerDied as again:
                death = again


def in_order(rows: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
    """Joins the parts of a split batch in the order of the batch's rows."""
    joined = torch.cat(list(parts))
    order = torch.tensor([row for part in rows for row in part])
    result = torch.empty_like(joined)
    result[order] = joined
    return result


def _logprobs(ranks: Ranks, batch: RolloutBatch) -> Tensor:
    rows = balance(batch.lengths.tolist(), len(ranks))
    refs = [rank.logprobs.remote(part) for rank, part in zip(ranks.handles, batch.split(rows), strict=True)]
    return in_order(rows, ranks.wait("logprobs", refs))


def kill(ranks: Ranks) -> None:
    """Ends the processes of a role."""
    for handle in ranks.handles:
        ray.kill(handle)
