"""Credit: turns scored samples, log-probs and values into batches ready for the losses. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tandem.platform.algorithms.correction import correct
from tandem.platform.algorithms.kl import kl
from tandem.platform.algorithms.registry import Algorithm
from tandem.platform.config.schema import AlgoConfig
from tandem.platform.experience.batch import Inferred, RolloutBatch, TrainBatch
from tandem.platform.experience.masked import masked_fill_zero, masked_mean, whiten
from tandem.platform.experience.metrics import Metrics


def penalised_rewards(batch: RolloutBatch, inferred: Inferred, algo: AlgoConfig, coef: float) -> RolloutBatch:
    """Token rewards less the KL penalty, r_t - coef * KL_t, on the tokens of the response mask.

    Ouyang et al., InstructGPT, eq. 2, https://arxiv.org/abs/2203.02155. A coefficient of 0 returns the batch unchanged.
    """
    if coef == 0:
        return batch
    assert inferred.ref_logprobs is not None, "a KL penalty needs reference log-probs"
    penalty = kl(inferred.old_logprobs, inferred.ref_logprobs, algo.kl_reward_estimator)
    penalty = masked_fill_zero(penalty, batch.response_mask)
    return replace(batch, token_rewards=batch.token_rewards - coef * penalty)


def credit(
    batch: RolloutBatch, inferred: Inferred, algorithm: Algorithm, algo: AlgoConfig, kl_coef: float | None = None
) -> tuple[TrainBatch, Metrics]:
    """The advantages (and returns) of every token the policy wrote, together with everything the losses read.

    In this order: KL penalty with `kl_coef` (default: `algo.kl_reward_coef`), estimator, masks (muted samples, overlong
    filter, correction), whitening over the remaining tokens. Samples masked here still count in their group's baseline.

    Metrics: with a reference, `kl/sampled` (nats per token, by `algo.kl_reward_estimator`, over the tokens of all scored
    samples, masked or not) and `kl/coef`; with a correction, `correction/*`.
    """
    kl_coef = algo.kl_reward_coef if kl_coef is None else kl_coef
    estimate = algorithm.estimator.advantages(penalised_rewards(batch, inferred, algo, kl_coef), inferred.values, algo)
    weights, metrics = None, _kl_metrics(batch, inferred, algo, kl_coef)
    muted = batch.muted | batch.truncated if algo.overlong_filter else batch.muted
    batch = replace(batch, muted=muted, response_mask=batch.response_mask & ~muted[:, None])
    if algo.correction != "none":
        correction = correct(inferred.old_logprobs, batch.rollout_logprobs, batch.response_mask, algo)
        weights, metrics = correction.weights, {**metrics, **correction.metrics}
        batch = replace(batch, response_mask=correction.mask)
    advantages = masked_fill_zero(estimate.advantages, batch.response_mask)
    if algo.whiten_advantages or algorithm.estimator.whitens:
        advantages = whiten(estimate.advantages, batch.response_mask)
    train_batch = TrainBatch(
        rollout=batch,
        old_logprobs=inferred.old_logprobs,
        advantages=advantages,
        ref_logprobs=inferred.ref_logprobs,
        old_values=inferred.values.values if inferred.values else None,
        returns=estimate.returns,
        weights=weights,
        positive=batch.scored & (batch.accuracies > algo.positive_above) if algo.positive_nll_coef > 0 else None,
    )
    return train_batch, metrics


def _kl_metrics(batch: RolloutBatch, inferred: Inferred, algo: AlgoConfig, coef: float) -> Metrics:
    if inferred.ref_logprobs is None:
        return {}
    metrics = {"kl/coef": coef or algo.kl_loss_coef}
    if batch.response_mask.any():
        estimate = kl(inferred.old_logprobs, inferred.ref_logprobs, algo.kl_reward_estimator)
        metrics["kl/sampled"] = float(masked_mean(estimate, batch.response_mask))
    return metrics


def halves(batch: TrainBatch) -> list[TrainBatch]:
    """The samples of every other prompt, and the remaining samples: two mini-batches, each with its own denominators.

    Empty if the batch has only one prompt.
    """
    groups = torch.unique(batch.rollout.group_ids, return_inverse=True)[1]
    parts = [batch.select((groups % 2 == half).nonzero().squeeze(1)) for half in (0, 1)]
    return [part.as_minibatch() for part in parts] if int(groups.max()) > 0 else []


def epochs(batch: TrainBatch, count: int, minibatches: int, seed: int) -> Iterator[list[TrainBatch]]:
    """Yields `count` lists of `minibatches` mini-batches, with the rows in a new random order in each epoch.

    Each mini-batch carries its own global denominators. All have the same number of rows; `validate` refuses sizes that do
    not divide. A mini-batch without any token in the losses is left out: its optimizer step would follow momentum alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        order = torch.randperm(len(batch), generator=generator)
        parts = [batch.select(rows).as_minibatch() for rows in order.chunk(minibatches)]
        yield [part for part in parts if part.num_tokens]
