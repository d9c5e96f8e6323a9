"""The data of a training step: one frozen type per stage.

    prompts -> generate -> score -> infer -> credit -> update -> publish
               Rollout[]   Rollout  Inferred  Train-   LossOutput
                           Batch              Batch

Legend: B sequences, T tokens (prompt then response, right-padded), P prompts per step, G samples per prompt (B = P x G).

Index t refers to token t everywhere: `logprobs[b, t]` = log p(token t | tokens before t), `values[b, t]` = value of the
prefix before token t. There is one token axis and one mask. Masks are derived from lengths and from who wrote a token,
never from token ids. Padding is never read, so its content does not affect results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

PADDED = -1  # value of padding in integer fields; no code may depend on it


class StopReason(StrEnum):
    """Why the sampling of a response ended."""

    STOP = "stop"  # the last response token is a stop token or completes a stop string
    LENGTH = "length"  # the token limit was reached

    @property
    def is_truncated(self) -> bool:
        """Whether the response was cut off before the policy ended it."""
        return self is StopReason.LENGTH


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt.

    Example: `Prompt(ids=(3, 4, 12), group_id=640, text="3+4=", answer="7")`.
    """

    ids: tuple[int, ...]
    group_id: int  # unique per dataset row and step; identifies the group of its samples
    text: str
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence, as the engine returned it: plain Python, without padding.

    Example: prompt "3+4=" answered with "7" and the end token 1:
    `Rollout(prompt=Prompt(...), response_ids=(9, 1), response_mask=(True, True), logprobs=(-0.3, -0.01),
    stop=StopReason.STOP, policy_version=0, response_text="7")`.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]  # False on tokens the policy did not write (tool output)
    logprobs: tuple[float, ...]  # under the sampling distribution, temperature included
    stop: StopReason
    policy_version: int
    response_text: str  # what reward functions read
    token_ends: tuple[int, ...] = ()  # for each token, the text's length in characters up to its end; only for step rewards

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.logprobs)}
        assert len(lengths) == 1, f"response_ids, response_mask and logprobs differ in length: {sorted(lengths)}"


@dataclass(frozen=True)
class Score:
    """The score that the reward role gives to one rollout.

    Example: `Score(reward=1.0, parts={"exact_match": 1.0})`; an unscorable sample:
    `Score(reward=None, parts={"exact_match": None}, problem="timeout")`; two steps, ending at response tokens 4 and 9:
    `Score(reward=1.0, steps={4: 1.0, 9: 0.0})`.
    """

    reward: float | None  # None = unscorable: masked out, excluded from the group's baseline, counted
    parts: Mapping[str, float | None] = field(default_factory=dict)
    problem: str | None = None  # "timeout" | "crash" | "none" | "nan" | "error"
    steps: Mapping[int, float] = field(default_factory=dict)  # parts of `reward`, by the token that ends the step
    raw: float | None = None  # the reward before shaping, if `reward` is shaped

    @property
    def accuracy(self) -> float | None:
        """The reward before shaping."""
        return self.reward if self.raw is None else self.raw


def real_tokens(lengths: Tensor, width: int) -> Tensor:
    """(B, width) bool: True on the tokens of right-padded rows of these lengths (B,), False in the padding."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


Batch = TypeVar("Batch", bound="_Rows")


@dataclass(frozen=True)
class _Rows:
    """Operations shared by the tensor types. Every Tensor field has B rows; nested batches are included."""

    def select(self: Batch, rows: Sequence[int] | Tensor) -> Batch:
        """The given rows, in the given order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return self._map(lambda tensor: tensor[index.to(tensor.device)])

    def split(self: Batch, parts: Sequence[Sequence[int]]) -> list[Batch]:
        """One batch per list of row numbers."""
        return [self.select(rows) for rows in parts]

    def to(self: Batch, device: torch.device | str) -> Batch:
        """The same rows on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self: Batch, function: Any) -> Batch:
        changes: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                changes[item.name] = function(value)
            elif isinstance(value, _Rows):
                changes[item.name] = value._map(function)
        return replace(self, **changes)


def _check(owner: str, shape: tuple[int, ...], dtype: torch.dtype, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        assert tuple(tensor.shape) == shape, f"{owner}.{name} has shape {tuple(tensor.shape)}, expected {shape}"
        assert tensor.dtype == dtype, f"{owner}.{name} has dtype {tensor.dtype}, expected {dtype}"


@dataclass(frozen=True)
class RolloutBatch(_Rows):
    """The scored samples of a step as padded tensors.

    Example: "3+4=" (4 tokens) answered "7<end>" with reward 1 and width 7:
    tokens [[3,10,4,12,9,1,-1]], response_mask [[0,0,0,0,1,1,0]], lengths [6], token_rewards [[0,0,0,0,0,1,0]].
    """

    tokens: Tensor  # (B, T) int64
    response_mask: Tensor  # (B, T) bool: tokens the policy wrote
    rollout_logprobs: Tensor  # (B, T) float32, as sampled
    lengths: Tensor  # (B,) int64: number of prompt and response tokens
    group_ids: Tensor  # (B,) int64
    rewards: Tensor  # (B,) float32, 0 where not scored
    accuracies: Tensor  # (B,) float32: the reward before any shaping, 0 where not scored
    baselines: Tensor  # (B,) float32: reward of the greedy response to the row's prompt; NaN where there is none
    scored: Tensor  # (B,) bool: False = unscorable, excluded from the losses and the baseline
    muted: Tensor  # (B,) bool: True = excluded from the losses, included in the baseline
    truncated: Tensor  # (B,) bool: by stop reason
    policy_version: Tensor  # (B,) int64
    token_rewards: Tensor  # (B, T) float32: step rewards where the steps end, the rest on the last response token
    step_ends: Tensor  # (B, T) bool: tokens that end a step; the last response token always does

    def __post_init__(self) -> None:
        b, t = self.tokens.shape
        _check("RolloutBatch", (b, t), torch.int64, tokens=self.tokens)
        _check("RolloutBatch", (b, t), torch.bool, response_mask=self.response_mask, step_ends=self.step_ends)
        rows_and_tokens = {"rollout_logprobs": self.rollout_logprobs, "token_rewards": self.token_rewards}
        _check("RolloutBatch", (b, t), torch.float32, **rows_and_tokens)
        rows = {"rewards": self.rewards, "accuracies": self.accuracies, "baselines": self.baselines}
        _check("RolloutBatch", (b,), torch.float32, **rows)
        _check("RolloutBatch", (b,), torch.bool, scored=self.scored, muted=self.muted, truncated=self.truncated)
        ints = {"lengths": self.lengths, "group_ids": self.group_ids, "policy_version": self.policy_version}
        _check("RolloutBatch", (b,), torch.int64, **ints)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def trim(self) -> RolloutBatch:
        """The same rows without the columns that are padding in all of them."""
        width = max(int(self.lengths.max()), 1)
        columns = {
            name: getattr(self, name)[:, :width]
            for name in ("tokens", "response_mask", "rollout_logprobs", "token_rewards", "step_ends")
        }
        return replace(self, **columns)

    @staticmethod
    def from_rollouts(
        rollouts: Sequence[Rollout], scores: Sequence[Score], baselines: Sequence[float | None] | None = None
    ) -> RolloutBatch:
        """Pads B rollouts, their scores and the baselines (rewards of greedy responses) into one batch.

        Rewards are placed on the last token that the policy wrote in each step, or in the response if there are no steps.
        An unscorable sample has an all-False response mask. So has an empty response, which still counts in its group with
        outcome 0.
        """
        assert len(rollouts) == len(scores), f"{len(rollouts)} rollouts but {len(scores)} scores"
        baselines = [None] * len(rollouts) if baselines is None else baselines
        assert len(baselines) == len(rollouts), f"{len(rollouts)} rollouts but {len(baselines)} baselines"
        for row, score in enumerate(scores):
            assert score.reward is None or math.isfinite(score.reward), f"score {row} is not finite: {score.reward}"
        lengths = [len(rollout.prompt.ids) + len(rollout.response_ids) for rollout in rollouts]
        b, t = len(rollouts), max(lengths)
        tokens = torch.full((b, t), PADDED, dtype=torch.int64)
        response_mask = torch.zeros(b, t, dtype=torch.bool)
        logprobs, token_rewards = torch.zeros(b, t), torch.zeros(b, t)
        step_ends = torch.zeros(b, t, dtype=torch.bool)
        for row, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            start, end = len(rollout.prompt.ids), lengths[row]
            tokens[row, :end] = torch.tensor(rollout.prompt.ids + rollout.response_ids)
            logprobs[row, start:end] = torch.tensor(rollout.logprobs)
            if score.reward is None:
                continue
            written = torch.tensor(rollout.response_mask, dtype=torch.bool)
            response_mask[row, start:end] = written
            for place, value in _placed_rewards(score, rollout.response_mask).items():
                token_rewards[row, start + place], step_ends[row, start + place] = value, True
        return RolloutBatch(
            tokens=tokens,
            response_mask=response_mask,
            rollout_logprobs=logprobs,
            lengths=torch.tensor(lengths),
            group_ids=torch.tensor([rollout.prompt.group_id for rollout in rollouts]),
            rewards=torch.tensor([score.reward or 0.0 for score in scores]),
            accuracies=torch.tensor([score.accuracy or 0.0 for score in scores]),
            baselines=torch.tensor([math.nan if value is None else value for value in baselines]),
            scored=torch.tensor([score.reward is not None for score in scores]),
            muted=torch.zeros(b, dtype=torch.bool),
            truncated=torch.tensor([rollout.stop.is_truncated for rollout in rollouts]),
            policy_version=torch.tensor([rollout.policy_version for rollout in rollouts]),
            token_rewards=token_rewards,
            step_ends=step_ends,
        )


def _placed_rewards(score: Score, written: Sequence[bool]) -> dict[int, float]:
    """Rewards by response token: step rewards, and the rest on the last token. Only tokens the policy wrote get rewards."""
    assert score.reward is not None, "an unscored sample has no rewards to place"
    places = [place for place, is_written in enumerate(written) if is_written]
    if not places:
        return {}
    placed: dict[int, float] = {}
    ends = sorted(score.steps)
    for end in ends[:-1]:
        place = max((token for token in places if token <= end), default=places[0])
        placed[place] = placed.get(place, 0.0) + score.steps[end]
    placed[places[-1]] = placed.get(places[-1], 0.0) + score.reward - sum(score.steps[end] for end in ends[:-1])
    return placed


@dataclass(frozen=True)
class Values(_Rows):
    """The critic's values of a batch."""

    values: Tensor  # (B, T) float32: value of the prefix before token t
    final: Tensor  # (B,) float32: value after the last token, read only to bootstrap truncated responses

    def __post_init__(self) -> None:
        _check("Values", tuple(self.values.shape), torch.float32, values=self.values)
        _check("Values", (self.values.shape[0],), torch.float32, final=self.final)


@dataclass(frozen=True)
class Inferred(_Rows):
    """Log-probs and values of a RolloutBatch before the update."""

    old_logprobs: Tensor  # (B, T) float32, actor at the start of the update
    ref_logprobs: Tensor | None = None  # (B, T) float32, only if a KL term needs them
    values: Values | None = None  # only with a critic

    def __post_init__(self) -> None:
        shape = tuple(self.old_logprobs.shape)
        _check("Inferred", shape, torch.float32, old_logprobs=self.old_logprobs, ref_logprobs=self.ref_logprobs)


@dataclass(frozen=True)
class Credit:
    """The result of an advantage estimator."""

    advantages: Tensor  # (B, T) float32, 0 outside the response mask
    returns: Tensor | None = None  # (B, T) float32, the critic's targets


@dataclass(frozen=True)
class TrainBatch(_Rows):
    """Samples with their advantages, ready for the losses.

    `num_tokens`, `num_sequences` and `num_positive_tokens` are GLOBAL denominators of the whole mini-batch. They do not
    depend on how it is split into ranks and micro-batches, so the gradient does not either.
    """

    rollout: RolloutBatch
    old_logprobs: Tensor  # (B, T) float32
    advantages: Tensor  # (B, T) float32
    ref_logprobs: Tensor | None = None  # (B, T) float32
    old_values: Tensor | None = None  # (B, T) float32
    returns: Tensor | None = None  # (B, T) float32
    weights: Tensor | None = None  # (B, T) float32, of the policy loss: correct for the sampler differing from the trainer
    positive: Tensor | None = None  # (B,) bool: correct answers, which the NLL term imitates
    num_tokens: int = 0
    num_sequences: int = 0
    num_positive_tokens: int = 0

    def __post_init__(self) -> None:
        shape = tuple(self.rollout.tokens.shape)
        _check("TrainBatch", shape, torch.float32, old_logprobs=self.old_logprobs, advantages=self.advantages)
        _check("TrainBatch", shape, torch.float32, ref_logprobs=self.ref_logprobs, old_values=self.old_values)
        _check("TrainBatch", shape, torch.float32, returns=self.returns, weights=self.weights)
        _check("TrainBatch", shape[:1], torch.bool, positive=self.positive)

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def mask(self) -> Tensor:
        """(B, T) bool: the tokens that count in the losses."""
        return self.rollout.response_mask

    def as_minibatch(self) -> TrainBatch:
        """The same rows as a whole mini-batch, with denominators counted from these rows."""
        return replace(
            self,
            num_tokens=int(self.mask.sum()),
            num_sequences=int(self.mask.any(dim=1).sum()),
            num_positive_tokens=0 if self.positive is None else int(self.mask[self.positive].sum()),
        )

    def trim(self) -> TrainBatch:
        """The same rows without the columns that are padding in all of them."""
        rollout = self.rollout.trim()
        width = rollout.tokens.shape[1]
        names = ("old_logprobs", "advantages", "ref_logprobs", "old_values", "returns", "weights")
        columns = {name: tensor[:, :width] for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, rollout=rollout, **columns)

    def blank(self) -> TrainBatch:
        """One row without tokens in the losses. A rank runs it if it has fewer micro-batches than another rank."""
        row = self.select([0])
        silent = replace(row.rollout, response_mask=torch.zeros_like(row.rollout.response_mask))
        return replace(row, rollout=silent)


@dataclass(frozen=True)
class LossOutput:
    """A loss and its metrics.

    `metrics` are (numerator, denominator) pairs that add up over micro-batches, ranks and mini-batches; `maxima` are
    combined with max.
    """

    loss: Tensor  # ()
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
