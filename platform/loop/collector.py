"""Collects the samples of a training step: prompts -> generate -> score, in one or more rounds.

One round samples `data.prompts_per_step` prompts. With `algo.dynamic_sampling`, rounds continue until every group of the
batch carries signal: Yu et al., DAPO, section 3.2, https://arxiv.org/abs/2503.14476

With `run.epochs`, the rounds end with the data; the last batch is then filled up with groups without signal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tandem.platform.algorithms.registry import Algorithm
from tandem.platform.config.schema import Config
from tandem.platform.data.prompt_source import PromptSource
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score
from tandem.platform.loop.group import Group, group_from_json, group_to_json, rollouts_of, samples_in, scores_of
from tandem.platform.loop.protocols import Roles, Sampling
from tandem.platform.loop.residency import Residency
from tandem.platform.loop.spans import Spans
from tandem.platform.rewards.shaping import RewardShaper

TRAINING_STREAM = 0  # part of the seed: separates training samples from other random numbers


class NoSignal(ValueError):
    """Dynamic sampling did not find enough groups whose samples differ in reward."""


@dataclass(frozen=True)
class Collected:
    """The batch of a step, and sample counts: sampled + carried = in the batch + filtered + leftover."""

    batch: RolloutBatch
    groups: Sequence[Group]  # of the batch, in its order
    sampled: Sequence[Group]  # all groups sampled in this step, whether or not they are in the batch
    rounds: int
    carried: int  # samples left over from the previous step
    filtered: int  # samples of groups without signal that are not in the batch
    leftover: int  # samples with signal beyond the batch, kept or dropped

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of the batch."""
        return rollouts_of(self.groups)

    @property
    def scores(self) -> list[Score]:
        """The scores of the batch."""
        return scores_of(self.groups)


class Collector:
    """Submits prompts, up to `rollout.max_staleness` rounds ahead, and collects scored groups."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        roles: Roles,
        source: PromptSource,
        steps: int,
        spans: Spans,
        residency: Residency,
    ) -> None:
        self.config, self.algorithm, self.roles, self.source = config, algorithm, roles, source
        self.steps, self.spans, self.residency = steps, spans, residency
        epochs, per_round = config.run.epochs, config.prompts_per_step
        self.rounds = math.inf if epochs is None else math.ceil(epochs * len(source.rows) / per_round)
        self.shaper = RewardShaper(config.reward, config.rollout.max_response_tokens)
        self.submitted = 0  # number of rounds submitted
        self.leftover: list[Group] = []
        self._pending: deque[Any] = deque()  # tickets of rounds being sampled, oldest first

    def state(self) -> dict[str, Any]:
        """The state that the next step depends on, as JSON values. A resumed run samples unfinished rounds again."""
        return {
            "rounds": self.taken,
            "leftover": [group_to_json(group) for group in self.leftover],
            "reward_moments": self.shaper.moments.state,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`."""
        self.submitted = state["rounds"]
        self.leftover = [group_from_json(group, self.source) for group in state["leftover"]]
        self.shaper.moments.state = state["reward_moments"]

    @property
    def taken(self) -> int:
        """Rounds whose samples have been collected."""
        return self.submitted - len(self._pending)

    @property
    def is_exhausted(self) -> bool:
        """Whether `run.epochs` passes over the data are complete; the remaining data is less than a batch."""
        return self.taken >= self.rounds

    def collect(self, step: int) -> Collected:
        """The batch of `step`, counted from 1.

        Raises:
            NoSignal: groups are missing after `algo.dynamic_max_rounds` rounds, with `algo.dynamic_at_cap=error`.
        """
        if self.config.algo.dynamic_sampling:
            return self._until_full(step)
        groups = self._round(step)
        return Collected(self._batch(groups, muted=0), groups, groups, rounds=1, carried=0, filtered=0, leftover=0)

    def _until_full(self, step: int) -> Collected:
        algo, wanted = self.config.algo, self.config.prompts_per_step
        carried, self.leftover = self.leftover, []
        full, silent, sampled, rounds = list(carried), list[Group](), list[Group](), 0
        while len(full) < wanted and rounds < algo.dynamic_max_rounds and self.taken < self.rounds:
            groups, rounds = self._round(step), rounds + 1
            sampled += groups
            full += [group for group in groups if group.varies(algo.dynamic_metric)]
            silent += [group for group in groups if not group.varies(algo.dynamic_metric)]
        full, surplus = full[:wanted], full[wanted:]
        missing = wanted - len(full)
        is_at_cap = rounds == algo.dynamic_max_rounds and not self.is_exhausted  # no further round could be made
        if missing and algo.dynamic_at_cap == "error" and is_at_cap:
            raise NoSignal(self._too_few(step, len(full), rounds))
        filling, dropped = silent[:missing], silent[missing:]
        if algo.dynamic_surplus == "keep":
            self.leftover = surplus
        batch = self._batch([*full, *filling], muted=0 if algo.dynamic_at_cap == "keep" else len(filling))
        return Collected(
            batch,
            [*full, *filling],
            sampled,
            rounds,
            samples_in(carried),
            filtered=samples_in(dropped),
            leftover=samples_in(surplus),
        )

    def _too_few(self, step: int, full: int, rounds: int) -> str:
        algo, prompts = self.config.algo, self.config.prompts_per_step
        return (
            f"step {step}: of {rounds * prompts} prompts in algo.dynamic_max_rounds={rounds} rounds, "
            f"only {full} have responses that differ in {algo.dynamic_metric}, but data.prompts_per_step={prompts} are "
            "needed. The data may be too easy or too hard. Set algo.dynamic_max_rounds higher, or algo.dynamic_at_cap=mask"
        )

    def _round(self, step: int) -> list[Group]:
        """Collects the oldest pending round, after submitting up to `max_staleness` later rounds."""
        ahead = min(self.config.rollout.max_staleness, self.steps - step)
        with self.spans.span("generate"):
            self.residency.sampling()
            while len(self._pending) < 1 + ahead and self.submitted < self.rounds:
                self._pending.append(self._submit())
            prompts, ticket, greedy_ticket = self._pending.popleft()
            sampled = self._finished(ticket)
            greedy = self._finished(greedy_ticket) if greedy_ticket is not None else {}
        with self.spans.span("score"):
            return self._score(len(prompts), sampled, greedy)

    def _finished(self, ticket: Any) -> dict[int, tuple[list[Rollout], Any]]:
        """Rollouts and scoring ticket by prompt position. Scoring starts as soon as the rollouts of a prompt exist."""
        return {
            place: (rollouts, self.roles.rewards.submit(rollouts))
            for place, rollouts in self.roles.rollouts.finished(ticket)
        }

    def _submit(self) -> tuple[list[Prompt], Any, Any]:
        self.submitted += 1
        prompts, sampling = self.source.prompts_of_round(self.submitted), self._sampling(self.submitted)
        ticket, greedy = self.roles.rollouts.submit(prompts, sampling), None
        if self.algorithm.estimator.needs_greedy:
            greedy = self.roles.rollouts.submit(prompts, replace(sampling, samples=1, temperature=0.0))
        return prompts, ticket, greedy

    def _sampling(self, number: int) -> Sampling:
        rollout = self.config.rollout
        return Sampling(
            samples=self.config.group,
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            seed=(self.config.sampling_seed, TRAINING_STREAM, number),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    def _score(
        self, prompts: int, sampled: Mapping[int, tuple[list[Rollout], Any]], greedy: Mapping[int, Any]
    ) -> list[Group]:
        """The groups of `prompts` prompts, in order."""
        collect = self.roles.rewards.collect
        scores = {place: collect(ticket) for place, (_, ticket) in sorted(sampled.items())}
        self.shaper.observe([score for place in range(prompts) for score in scores[place]])
        groups = []
        for place in range(prompts):
            rollouts = sampled[place][0]
            baseline, tokens = None, 0
            if greedy:
                [best], ticket = greedy[place]
                [score] = self.shaper.shape([best], collect(ticket))
                baseline, tokens = score.reward, len(best.response_ids)
            groups.append(Group(rollouts, self.shaper.shape(rollouts, scores[place]), baseline, tokens))
        return groups

    def _batch(self, groups: Sequence[Group], muted: int) -> RolloutBatch:
        """All samples of the groups. The samples of the last `muted` groups are excluded from the losses."""
        with self.spans.span("score"):
            baselines = [group.baseline for group in groups for _ in group.rollouts]
            batch = RolloutBatch.from_rollouts(rollouts_of(groups), scores_of(groups), baselines)
        rows = torch.arange(len(batch)) >= len(batch) - samples_in(groups[len(groups) - muted :])
        return replace(batch, muted=rows)
