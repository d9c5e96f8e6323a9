"""Actors and critics of the embedded model, one rank in this process, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.platform.config.schema import ActorConfig, AlgoConfig, CriticConfig, ModelConfig, TrainerConfig
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, StopReason, TrainBatch
from tandem.workers.cluster.runtime import Rank
from tandem.workers.roles.actor import ActorSpec, ActorWorker
from tandem.workers.roles.critic import CriticSpec, CriticWorker


def actor(path: str, budget: int = 10_000, **algo: object) -> ActorWorker:
    spec = ActorSpec(
        path=path,
        model=ModelConfig(),
        actor=ActorConfig(lr=1e-2, eps=1e-4),  # otherwise Adam turns rounding noise into a full step
        trainer=TrainerConfig(bucket_mb=1),
        algo=AlgoConfig(**algo),  # type: ignore[arg-type]
        temperature=0.8,
        max_response_tokens=8,
        max_tokens_per_microbatch=budget,
        timeout_s=60,
    )
    worker = ActorWorker(spec, Rank())
    worker.start()
    return worker


def critic(path: str, budget: int = 10_000) -> CriticWorker:
    config = CriticConfig(lr=1e-2, eps=1e-4)
    worker = CriticWorker(CriticSpec(path, ModelConfig(), config, TrainerConfig(), "token-mean", 8, budget, 60), Rank())
    worker.start()
    return worker


def samples(count: int = 6) -> RolloutBatch:
    """Rows of different lengths with tokens of the embedded vocabulary."""
    draw = torch.Generator().manual_seed(0)
    rollouts = []
    for row in range(count):
        prompt, response = 2 + row % 3, 1 + row % 5
        ids = torch.randint(3, 15, (prompt + response,), generator=draw).tolist()
        own = Prompt(ids=tuple(ids[:prompt]), group_id=row // 2, text="")
        mask, logprobs = (True,) * response, (-1.0,) * response
        rollouts.append(Rollout(own, tuple(ids[prompt:]), mask, logprobs, StopReason.STOP, 0, ""))
    return RolloutBatch.from_rollouts(rollouts, [Score(reward=float(row % 2)) for row in range(count)])


def train_batch(batch: RolloutBatch, old: Tensor, seed: int = 1) -> TrainBatch:
    noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(seed))
    return TrainBatch(
        batch, old, noise, ref_logprobs=old - 0.1, old_values=torch.zeros_like(old), returns=noise.abs()
    ).as_minibatch()


def weights(worker: ActorWorker | CriticWorker) -> Tensor:
    buckets = worker.backend.named_weights(1 << 20)
    return torch.cat([tensor.flatten() for bucket in buckets for tensor in bucket.values()])
