"""Random batches with every irregularity: gaps, empty responses, unscored samples, uneven groups, NaN poison."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from reference import Sample
from reference_losses import Row
from torch import Tensor
from unit_batches import batch_of, poison

from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.batch import Inferred, RolloutBatch, TrainBatch, Values

BAD = (math.nan, math.inf, -math.inf, 100.0)
ROWS, WIDTH, LONGEST = 12, 11, 9
GROUPS = (7, 4, 7, 10**12 + 3, 4, 7, 4, 10**12 + 3, 7, 4, 5, 5)  # groups of 4, 4, 2 and 2; group 5 is constant

# Every setting an estimator reads, at least once.
SETTINGS: dict[str, list[AlgoConfig]] = {
    "gae": [
        AlgoConfig(gamma=0.9, lam=0.8),
        AlgoConfig(gamma=0.97, lam=1.0, lam_policy=0.5),
        AlgoConfig(lam=0.9, lam_length_alpha=0.3),
        AlgoConfig(lam=0.9, lam_length_alpha=2.0, bootstrap_truncated=True),
        AlgoConfig(gamma=0.9, lam=0.7, bootstrap_truncated=True, whiten_advantages=True),
    ],
    "grpo": [*(AlgoConfig(group_std=std) for std in ("sample", "population", "none")), AlgoConfig(whiten_advantages=True)],
    "dr_grpo": [AlgoConfig()],
    "grpo_process": [AlgoConfig(group_std=std) for std in ("sample", "population", "none")],
    "rloo": [AlgoConfig()],
    "reinforce": [AlgoConfig(), AlgoConfig(whiten_advantages=True)],
    "reinforce_pp": [AlgoConfig(), AlgoConfig(gamma=0.9)],
    "reinforce_pp_baseline": [AlgoConfig()],
    "remax": [AlgoConfig()],
    "opo": [AlgoConfig()],
}
VARIANTS = [(name, n) for name, variants in SETTINGS.items() for n in range(len(variants))]


@dataclass(frozen=True)
class Case:
    """Samples, with the outputs of the models for them."""

    batch: RolloutBatch
    inferred: Inferred

    def select(self, rows: Any) -> Case:
        return Case(self.batch.select(rows), self.inferred.select(rows))


def _mask(rng: np.random.Generator, scored: Tensor) -> tuple[Tensor, Tensor]:
    mask, lengths = torch.zeros(ROWS, WIDTH, dtype=torch.bool), torch.zeros(ROWS, dtype=torch.int64)
    for row in range(ROWS):
        end = int(rng.integers(2, WIDTH + 1))
        start = end if row == 4 else int(rng.integers(1, end))  # row 4 has an empty response
        mask[row, start:end] = torch.from_numpy(rng.random(end - start) < 0.8)
        lengths[row] = end
    return mask & scored[:, None], lengths


def _rewards(rng: np.random.Generator, seed: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(token rewards, step ends); rewards tie for even seeds and are arbitrary for odd seeds; one group is constant."""
    ties = torch.from_numpy(rng.choice([-1, -0.5, 0, 0.25, 1], (ROWS, WIDTH)) * (rng.random((ROWS, WIDTH)) < 0.3)).float()
    rewards = torch.from_numpy(rng.normal(size=(ROWS, WIDTH))).float() if seed % 2 else ties
    ends = torch.from_numpy(rng.random((ROWS, WIDTH)) < 0.3) & mask
    for row in range(ROWS):
        own = mask[row].nonzero()
        if len(own):
            ends[row, own[-1]] = True
        if GROUPS[row] == 5:
            rewards[row], ends[row] = 0.0, False
            if len(own):
                rewards[row, own[-1]], ends[row, own[-1]] = 0.35, True
    return rewards, ends


def random_case(seed: int, bad: float = math.nan, scored_only: bool = False) -> Case:
    """A random case; `bad` is in every place that must not be read."""
    rng = np.random.default_rng(seed)
    scored = torch.from_numpy(rng.random(ROWS) > 0.15) | torch.tensor(scored_only)
    mask, lengths = _mask(rng, scored)
    rewards, ends = _rewards(rng, seed, mask)
    old, ref, sampler, values = (torch.from_numpy(rng.normal(size=(ROWS, WIDTH))).float() * 0.4 - 1 for _ in range(4))
    truncated = torch.from_numpy(rng.random(ROWS) < 0.4)
    baselines = torch.where(torch.from_numpy(rng.random(ROWS) < 0.7) & scored, torch.from_numpy(rng.random(ROWS)), math.nan)
    final = poison(torch.from_numpy(rng.normal(size=ROWS)).float(), truncated, bad)
    batch = batch_of(
        mask,
        poison(rewards, mask, bad),
        lengths=lengths,
        group_ids=torch.tensor(GROUPS),
        rollout_logprobs=poison(sampler, mask, bad),
        scored=scored,
        truncated=truncated,
        muted=torch.from_numpy(rng.random(ROWS) < 0.15),
        baselines=baselines.float(),
        step_ends=ends,
    )
    inferred = Inferred(poison(old, mask, bad), poison(ref, mask, bad), Values(poison(values, mask, bad), final))
    return Case(batch, inferred)


def samples_of(case: Case) -> list[Sample]:
    """The rows of a case in the form that the reference implementation reads."""
    batch, inferred = case.batch, case.inferred
    assert inferred.values is not None
    assert inferred.ref_logprobs is not None
    found = []
    for b in range(len(batch)):
        own = batch.response_mask[b]
        found.append(
            Sample(
                group=int(batch.group_ids[b]),
                scored=bool(batch.scored[b]),
                truncated=bool(batch.truncated[b]),
                muted=bool(batch.muted[b]),
                baseline=float(batch.baselines[b]),
                rewards=batch.token_rewards[b][own].tolist(),
                ends=batch.step_ends[b][own].tolist(),
                values=inferred.values.values[b][own].tolist(),
                final=float(inferred.values.final[b]),
                old=inferred.old_logprobs[b][own].tolist(),
                ref=inferred.ref_logprobs[b][own].tolist(),
                sampler=batch.rollout_logprobs[b][own].tolist(),
            )
        )
    return found


def widened(case: Case, columns: int, filler: float) -> Case:
    """The same rows with this many more columns of padding on the right."""

    def wide(tensor: Tensor) -> Tensor:
        pads = torch.zeros if tensor.dtype == torch.bool else lambda *shape: torch.full(shape, filler)
        number = -1 if tensor.dtype == torch.int64 else None
        more = pads(len(tensor), columns) if number is None else torch.full((len(tensor), columns), number)
        return torch.cat([tensor, more.to(tensor.dtype)], dim=1)

    def widen(item: Any) -> Any:
        return replace(item, **{k: wide(v) for k, v in vars(item).items() if isinstance(v, Tensor) and v.dim() == 2})

    values = None if case.inferred.values is None else widen(case.inferred.values)
    return Case(widen(case.batch), replace(widen(case.inferred), values=values))


def train_case(seed: int, bad: float = math.nan) -> tuple[TrainBatch, Tensor, Tensor]:
    """(a batch for the losses, new log-probs, entropies); the log-ratios are large enough that every clip acts."""
    rng = np.random.default_rng(seed)
    case = random_case(seed, bad)
    mask = case.batch.response_mask

    def draw(scale: float, shift: float) -> Tensor:
        return poison(torch.from_numpy(rng.normal(size=(ROWS, WIDTH))).float() * scale + shift, mask, bad)

    assert case.inferred.ref_logprobs is not None
    batch = TrainBatch(
        rollout=case.batch,
        old_logprobs=case.inferred.old_logprobs,
        advantages=draw(1.0, 0.0),
        ref_logprobs=case.inferred.ref_logprobs,
        old_values=draw(1.0, 0.0),
        returns=draw(1.0, 0.0),
        weights=draw(0.3, 1.0),
        positive=torch.from_numpy(rng.random(ROWS) < 0.5),
    )
    return batch.as_minibatch(), draw(0.8, -1.0), draw(0.5, 1.0)


def rows_of(batch: TrainBatch, entropy: Tensor) -> list[Row]:
    """The rows of a batch for the losses, in the form that the reference implementation reads."""
    found = []
    for b, own in enumerate(batch.mask):

        def numbers(tensor: Tensor | None, row: int = b, own: Tensor = own) -> list[float]:
            return [1.0] * int(own.sum()) if tensor is None else tensor[row][own].tolist()

        found.append(
            Row(
                old=numbers(batch.old_logprobs),
                ref=numbers(batch.ref_logprobs),
                advantages=numbers(batch.advantages),
                weights=numbers(batch.weights),
                entropy=numbers(entropy),
                positive=bool(batch.positive is not None and batch.positive[b]),
            )
        )
    return found
