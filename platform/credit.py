"""Credit: from scored samples and what the models say of them to batches ready for the losses. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tandem.platform.algorithms import Algorithm
from tandem.platform.batch import Inferred, RolloutBatch, TrainBatch
from tandem.platform.config import AlgoConfig, TrainConfig
from tandem.platform.kl import kl
from tandem.platform.masked import masked_fill_zero, whiten


def penalised_rewards(batch: RolloutBatch, inferred: Inferred, algo: AlgoConfig) -> RolloutBatch:
    """Token rewards less the KL penalty, r_t - beta * KL_t, on the tokens of the response mask.

    Ouyang et al., InstructGPT, eq. 2, https://arxiv.org/abs/2203.02155. With `algo.kl_reward_coef` 0, the batch as it is.
    """
    if algo.kl_reward_coef == 0:
        return batch
    assert inferred.ref_logprobs is not None, "a KL penalty needs reference log-probs"
    penalty = kl(inferred.old_logprobs, inferred.ref_logprobs, algo.kl_reward_estimator)
    penalty = masked_fill_zero(penalty, batch.response_mask)
    return replace(batch, token_rewards=batch.token_rewards - algo.kl_reward_coef * penalty)


def credit(batch: RolloutBatch, inferred: Inferred, algorithm: Algorithm, algo: AlgoConfig) -> TrainBatch:
    """The advantages (and returns) of every token the policy wrote, with all that the losses read."""
    given = algorithm.advantages(penalised_rewards(batch, inferred, algo), inferred.values, algo)
    advantages = whiten(given.advantages, batch.response_mask) if algo.whiten_advantages else given.advantages
    return TrainBatch(
        rollout=batch,
        old_logprobs=inferred.old_logprobs,
        advantages=advantages,
        ref_logprobs=inferred.ref_logprobs,
        old_values=inferred.values.values if inferred.values else None,
        returns=given.returns,
    )


def minibatches(batch: TrainBatch, train: TrainConfig, seed: int) -> Iterator[TrainBatch]:
    """`epochs_per_batch` x `minibatches` parts of the batch, in a new random order of rows in each epoch.

    Each carries its own global denominators. Mini-batches are of equal size in rows; `validate` refuses sizes that do not
    divide.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(train.epochs_per_batch):
        order = torch.randperm(len(batch), generator=generator)
        for rows in order.chunk(train.minibatches):
            yield batch.select(rows).as_minibatch()
