"""The actor role: the policy under training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.platform.algorithms.logprobs import token_entropy, token_logprobs
from tandem.platform.algorithms.objectives import policy_objective
from tandem.platform.algorithms.registry import objective_of
from tandem.platform.config.schema import ActorConfig, AlgoConfig, ModelConfig, TrainerConfig
from tandem.platform.experience.batch import LossOutput, RolloutBatch, TrainBatch
from tandem.platform.loop.checksum import checksum
from tandem.platform.loop.protocols import Totals
from tandem.workers.cluster.runtime import Rank
from tandem.workers.models.loading import batch_logprobs, load_policy, token_logits
from tandem.workers.roles.microbatches import infer, training_parts
from tandem.workers.roles.trained import TrainedWorker
from tandem.workers.sync.transports import Channel, ObjectStore, Sent, Transport, open_transport


@dataclass(frozen=True)
class ActorSpec:
    """The settings of an actor rank."""

    path: str
    model: ModelConfig
    actor: ActorConfig
    trainer: TrainerConfig
    algo: AlgoConfig
    temperature: float
    max_response_tokens: int
    max_tokens_per_microbatch: int
    timeout_s: float  # of a collective operation
    seed: int = 0  # of the process's random generators


class ActorWorker(TrainedWorker):
    """One rank of the actor. A single-rank actor implements the `Actor` protocol directly."""

    name = "actor"

    def __init__(self, spec: ActorSpec, rank: Rank) -> None:
        super().__init__(rank, spec.max_tokens_per_microbatch, spec.timeout_s, spec.seed)
        self.spec = spec
        self._checksums: dict[str, int] = {}
        self._transport: Transport = ObjectStore()

    def start(self, address: tuple[str, int] | None = None) -> None:
        """Loads the model and joins the other ranks at `address`; collective."""
        spec = self.spec
        model = load_policy(spec.path, spec.model)
        self.backend = self.make_backend(model, spec.actor, spec.trainer, spec.model, address)

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """(B, T) float32 log-probs of the rows' tokens at the sampling temperature."""
        return infer(self.backend, batch, self.max_tokens, self._logprobs)

    def gradient_noise(self, halves: Sequence[TrainBatch]) -> Totals:
        """Measures how much the gradients of two batch halves differ. Each rank has a part of both; no weight changes."""
        parts = [training_parts(self.backend, half, self.max_tokens) for half in halves]
        return self.backend.gradient_noise(parts, self._objective)

    def open_channel(self, channel: Channel) -> None:
        """Opens the sending end; with `broadcast`, returns once every end is open."""
        self._transport = open_transport(channel, self.device)

    def weight_buckets(self, verify: bool = True) -> Iterator[Sent]:
        """Yields the weights in buckets, packed for sending; with `verify`, records their checksums."""
        for _ in range(self.begin_export(verify)):
            yield self.next_bucket()
        self.end_export()

    def begin_export(self, verify: bool, shared: bool = False) -> int:
        """Resets `next_bucket` to the first bucket; returns the number of buckets. `shared` forces the Ray object store."""
        self._checksums = {}
        self._sending: Transport = ObjectStore() if shared else self._transport
        self._verify = verify
        bucket_bytes = self.spec.trainer.bucket_mb << 20
        self._export = self.backend.named_weights(bucket_bytes, self._sending.device, self._sending.from_every_rank)
        return self.backend.bucket_count(bucket_bytes)

    def next_bucket(self) -> Sent:
        """The next bucket; empty on ranks that do not send. Collective."""
        bucket = next(self._export)
        if self._verify:
            self._checksums |= {name: checksum(tensor.cpu()) for name, tensor in bucket.items()}
        return Sent(self._sending.send(bucket) if bucket else None, self._verify)

    def end_export(self) -> None:
        """Returns when all sends have completed."""
        self._sending.finish()

    def weight_checksums(self) -> dict[str, int]:
        """Checksum of every tensor in the latest export."""
        return self._checksums

    def _logprobs(self, forward: Callable[..., Any], batch: RolloutBatch) -> Tensor:
        return batch_logprobs(forward, batch, self.spec.temperature)

    def _objective(self, forward: Callable[..., Any], batch: TrainBatch) -> LossOutput:
        return actor_objective(self.spec, forward, batch)


def actor_objective(spec: ActorSpec, forward: Callable[..., Any], batch: TrainBatch) -> LossOutput:
    """The share of one micro-batch, on the model's device, in the policy loss of its mini-batch."""
    logits, policy_loss = token_logits(forward, batch.rollout), objective_of(spec.algo.policy_loss).loss
    logprobs = token_logprobs(logits, batch.rollout.tokens, spec.temperature)
    # Without an entropy bonus, entropy is only a metric and needs no graph.
    with torch.set_grad_enabled(spec.algo.entropy_coef > 0):
        entropy = token_entropy(logits, spec.temperature)
    return policy_objective(logprobs, entropy, batch, policy_loss, spec.algo, spec.max_response_tokens)
