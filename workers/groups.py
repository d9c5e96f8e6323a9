"""Typed facades over the Ray actors of each role: split a batch over the ranks, call, gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from tandem.platform.batch import Prompt, Rollout, RolloutBatch, Score, TrainBatch, Values
from tandem.platform.metrics import add_totals
from tandem.platform.partition import balance
from tandem.platform.protocols import Sampling, Totals, WeightSyncError
from tandem.workers.calls import Ranks


class _Group:
    """The ranks of a role."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over ranks."""
        parts = self.ranks.wait("memory", [rank.memory.remote() for rank in self.ranks.handles])
        return {kind: sum(part[kind] for part in parts) for kind in parts[0]}


class ActorGroup(_Group):
    """The `Actor` protocol over data-parallel ranks."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs of the sampled tokens at the sampling temperature."""
        return _logprobs(self.ranks, batch)

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """One optimizer step per mini-batch, in order."""
        return _update(self.ranks, minibatches)

    def weight_buckets(self) -> Iterator[Any]:
        """References to the weights in parts; the tensors go from the actor to the engines, not through here."""
        [count, *_] = self.ranks.wait("begin_export", [rank.begin_export.remote() for rank in self.ranks.handles])
        for _ in range(count):
            refs = [rank.next_bucket.remote() for rank in self.ranks.handles]
            yield refs[0]
            self.ranks.wait("next_bucket", refs)

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of every tensor that `weight_buckets` gave last."""
        [checksums] = self.ranks.wait("weight_checksums", [self.ranks.handles[0].weight_checksums.remote()])
        return dict(checksums)


class ReferenceGroup(_Group):
    """The `Reference` protocol over independent ranks."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32, as `ActorGroup.logprobs`."""
        return _logprobs(self.ranks, batch)


class CriticGroup(_Group):
    """The `Critic` protocol over data-parallel ranks."""

    def values(self, batch: RolloutBatch) -> Values:
        """Value of every prefix."""
        rows = balance(batch.lengths.tolist(), len(self.ranks))
        refs = [rank.values.remote(part) for rank, part in zip(self.ranks.handles, batch.split(rows), strict=True)]
        parts = self.ranks.wait("values", refs)
        return Values(in_order(rows, [part.values for part in parts]), in_order(rows, [part.final for part in parts]))

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        """One optimizer step per mini-batch, in order."""
        return _update(self.ranks, minibatches)


class RewardGroup(_Group):
    """The `Rewards` protocol over one worker, which has processes of its own."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order."""
        [scores] = self.ranks.wait("score", [self.ranks.handles[0].score.remote(list(rollouts))])
        return list(scores)


class RolloutGroup(_Group):
    """The `Rollouts` protocol over replicas."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._loading: list[Any] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        """Starts sampling on every replica; the ticket is the references with the prompts behind each."""
        # As many samples as each prompt asks for are alike in length, so prompts are balanced by their own tokens.
        rows = balance([len(prompt.ids) for prompt in prompts], len(self.ranks))
        refs = [
            rank.generate.remote([prompts[row] for row in part], sampling)
            for rank, part in zip(self.ranks.handles, rows, strict=True)
        ]
        return refs, rows, sampling.samples

    def collect(self, ticket: Any) -> list[Rollout]:
        """Waits for a ticket: the samples of each prompt side by side, in order of the prompts."""
        refs, rows, samples = ticket
        results: dict[int, list[Rollout]] = {}
        for part, rollouts in zip(rows, self.ranks.wait("generate", refs), strict=True):
            for place, row in enumerate(part):
                results[row] = rollouts[place * samples : (place + 1) * samples]
        return [rollout for row in sorted(results) for rollout in results[row]]

    def load_weights(self, bucket: Any) -> None:
        """Sends one part of new weights to every replica; the one before must have arrived, so few are on the way."""
        self.ranks.wait("load_weights", self._loading)
        self._loading = [rank.load_weights.remote(bucket) for rank in self.ranks.handles]

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        """Declares the weights complete.

        Raises:
            WeightSyncError: a replica does not hold what was sent; names the first tensor.
        """
        self.ranks.wait("load_weights", self._loading)
        self._loading = []
        arrived = self.ranks.wait("finish_weights", [rank.finish_weights.remote(version) for rank in self.ranks.handles])
        for number, own in enumerate(arrived):
            compare_checksums(checksums, own, f"rollout replica {number}")


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


def in_order(rows: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
    """The parts of a split batch put back in the order of its rows."""
    joined = torch.cat(list(parts))
    order = torch.tensor([row for part in rows for row in part])
    result = torch.empty_like(joined)
    result[order] = joined
    return result


def _logprobs(ranks: Ranks, batch: RolloutBatch) -> Tensor:
    rows = balance(batch.lengths.tolist(), len(ranks))
    refs = [rank.logprobs.remote(part) for rank, part in zip(ranks.handles, batch.split(rows), strict=True)]
    return in_order(rows, ranks.wait("logprobs", refs))


def _update(ranks: Ranks, minibatches: Sequence[TrainBatch]) -> Totals:
    shares: list[list[TrainBatch]] = [[] for _ in ranks.handles]
    for minibatch in minibatches:
        rows = balance(minibatch.rollout.lengths.tolist(), len(ranks))
        for share, part in zip(shares, rows, strict=True):
            share.append(minibatch.select(part) if part else minibatch.blank())
    refs = [rank.update.remote(share) for rank, share in zip(ranks.handles, shares, strict=True)]
    return add_totals(ranks.wait("update", refs))


def kill(ranks: Ranks) -> None:
    """Ends the processes of a role."""
    for handle in ranks.handles:
        ray.kill(handle)
