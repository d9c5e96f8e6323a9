"""Collecting the samples of a step: rounds, dynamic sampling, greedy baselines, shaping. The roles are scripted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from unit_batches import make_rollout

from tandem.platform.algorithms.registry import resolve
from tandem.platform.config.schema import Config, RewardConfig
from tandem.platform.data.prompt_source import PromptSource
from tandem.platform.data.prompts import EncodedRow
from tandem.platform.data.rows import DataOrder, Row
from tandem.platform.experience.batch import Prompt, Rollout, Score
from tandem.platform.loop.collector import Collected, Collector, NoSignal
from tandem.platform.loop.protocols import Roles, Sampling
from tandem.platform.loop.residency import Residency
from tandem.platform.loop.spans import Spans
from tandem.platform.rewards.shaping import RewardShaper


class Scripted:
    """Samples two tokens per response. Sample n of group g has reward `rewards[g][n]`; a greedy response has 0.25."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Sampling]] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        self.asked.append(([prompt.group_id for prompt in prompts], sampling))
        texts = [str(n) if sampling.temperature else "greedy" for n in range(sampling.samples)]
        return [make_rollout(p.ids, group=p.group_id, text=text) for p in prompts for text in texts]

    def finished(self, ticket: list[Rollout]) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields the last prompt first."""
        by_group: dict[int, list[Rollout]] = {}
        for rollout in ticket:
            by_group.setdefault(rollout.prompt.group_id, []).append(rollout)
        yield from reversed(list(enumerate(by_group.values())))


class ScriptedRewards:
    def __init__(self, rewards: Mapping[int, Sequence[float | None]]) -> None:
        self.rewards = rewards

    def submit(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(rollout) for rollout in rollouts]

    def collect(self, ticket: list[Score]) -> list[Score]:
        return ticket

    def _score(self, rollout: Rollout) -> Score:
        if rollout.response_text == "greedy":
            return Score(0.25)
        return Score(self.rewards.get(rollout.prompt.group_id, (0.0, 1.0))[int(rollout.response_text)])


MIXED, ALIKE = (0.0, 1.0), (1.0, 1.0)


def make(rewards: Mapping[int, Sequence[float | None]], estimator: str = "grpo", **algo: Any) -> tuple[Collector, Scripted]:
    """A collector of batches of 2 prompts with 2 samples each; `algo` are settings of the same name, on a dynamic run."""
    config = Config(adv_estimator=estimator)
    config.data.prompts_per_step = config.rollout.samples_per_prompt = 2
    config.algo.dynamic_sampling = algo.pop("dynamic", True)
    for name, value in algo.items():
        setattr(config.algo, f"dynamic_{name}", value)
    roles = Scripted()
    rows = [EncodedRow(Row("p"), (3, 4), "p") for _ in range(50)]
    source = PromptSource(rows, DataOrder(50, 2, seed=0))
    everything = Roles(actor=None, rewards=ScriptedRewards(rewards), rollouts=roles)  # type: ignore[arg-type]
    algorithm = resolve("any", estimator, "clipped_surrogate")
    return Collector(config, algorithm, everything, source, 10, Spans(), Residency(everything)), roles


def groups(collected: Collected) -> list[int]:
    return [group.rollouts[0].prompt.group_id for group in collected.groups]


def counts(collected: Collected) -> tuple[int, int, int, int]:
    sampled = sum(len(group.rollouts) for group in collected.sampled)
    return sampled, collected.carried, collected.filtered, collected.leftover


def test_without_dynamic_sampling_a_step_is_one_round() -> None:
    collector, roles = make({0: ALIKE, 1: ALIKE}, dynamic=False)
    first, second = collector.collect(1), collector.collect(2)
    assert (groups(first), groups(second)) == ([0, 1], [2, 3])
    assert counts(first) == (4, 0, 0, 0)
    assert not first.batch.muted.any()
    assert [seed for _, sampling in roles.asked for seed in sampling.seed[2:]] == [1, 2]


def test_groups_without_signal_are_sampled_anew() -> None:
    collector, _ = make({0: ALIKE, 1: MIXED, 2: ALIKE, 3: ALIKE, 4: MIXED, 5: ALIKE})
    collected = collector.collect(1)
    assert groups(collected) == [1, 4]
    assert (collected.rounds, counts(collected)) == (3, (12, 0, 8, 0))
    assert not collected.batch.muted.any()
    assert groups(collector.collect(2)) == [6, 7]  # the next step goes on where this one ended


def test_surplus_is_dropped_and_counted() -> None:
    collector, _ = make({0: ALIKE})
    collected = collector.collect(1)
    assert (groups(collected), counts(collected)) == ([1, 2], (8, 0, 2, 2))
    assert groups(collector.collect(2)) == [4, 5]


def test_surplus_is_kept_for_the_next_step() -> None:
    collector, _ = make({0: ALIKE}, surplus="keep")
    first, second = collector.collect(1), collector.collect(2)
    assert (groups(first), counts(first)) == ([1, 2], (8, 0, 2, 2))
    assert (groups(second), counts(second)) == ([3, 4], (4, 2, 0, 2))


NONE = dict.fromkeys(range(20), ALIKE)


@pytest.mark.parametrize(("at_cap", "muted"), [("mask", [False] * 2 + [True] * 2), ("keep", [False] * 4)])
def test_at_the_cap_the_batch_is_filled_up(at_cap: str, muted: list[bool]) -> None:
    collector, _ = make({**NONE, 3: MIXED}, at_cap=at_cap, max_rounds=2)
    collected = collector.collect(1)
    assert (groups(collected), collected.rounds) == ([3, 0], 2)
    assert counts(collected) == (8, 0, 4, 0)
    assert collected.batch.muted.tolist() == muted


def bounded(rewards: Mapping[int, Sequence[float | None]], rounds: int, **algo: Any) -> tuple[Collector, Scripted]:
    """Like `make`, but the data end after this many rounds."""
    collector, roles = make(rewards, **algo)
    collector.rounds = rounds
    return collector, roles


@pytest.mark.parametrize("at_cap", ["mask", "error"])
def test_data_that_ends_fills_the_last_batch_up(at_cap: str) -> None:
    """When the data end, groups without signal fill the batch and are muted in the losses."""
    collector, roles = bounded({**NONE, 0: MIXED, 1: MIXED, 3: MIXED}, rounds=3, at_cap=at_cap)
    assert groups(collector.collect(1)) == [0, 1]
    assert not collector.is_exhausted
    last = collector.collect(2)
    assert (groups(last), last.rounds, last.batch.muted.tolist()) == ([3, 2], 2, [False] * 2 + [True] * 2)
    assert collector.is_exhausted
    assert [prompts for prompts, _ in roles.asked] == [[0, 1], [2, 3], [4, 5]]


def test_samples_ahead_stay_within_the_data() -> None:
    collector, roles = bounded({}, rounds=3, dynamic=False)
    collector.config.rollout.max_staleness = 2
    for step in (1, 2, 3):
        assert not collector.is_exhausted
        collector.collect(step)
    assert collector.is_exhausted
    assert len(roles.asked) == 3


def test_rounds_follow_from_epochs_and_rows() -> None:
    config, (given, _) = Config(), make({})
    config.data.prompts_per_step, config.run.epochs = 8, 1.5
    more = given.algorithm, given.roles, given.source, 10, given.spans, given.residency
    assert Collector(config, *more).rounds == 10  # 75 prompts of 50 rows
    config.run.epochs = None
    assert Collector(config, *more).rounds == math.inf


def test_at_the_cap_without_any_signal_all_is_muted() -> None:
    collector, _ = make(NONE, max_rounds=1)
    assert collector.collect(1).batch.muted.tolist() == [True] * 4


def test_at_the_cap_the_run_stops_if_asked_to() -> None:
    collector, _ = make({**NONE, 3: MIXED}, at_cap="error", max_rounds=2)
    with pytest.raises(NoSignal, match=r"step 1: of 4 prompts in algo\.dynamic_max_rounds=2 rounds, only 1 have"):
        collector.collect(1)


def test_data_that_ends_at_the_cap_ends_the_run_well() -> None:
    """At the end of the data there is no error about max_rounds, because more rounds would find no more prompts."""
    collector, _ = make({**NONE, 3: MIXED}, at_cap="error", max_rounds=2)
    collector.rounds = 2
    collected = collector.collect(1)
    assert (groups(collected), collected.rounds) == ([3, 0], 2)
    assert collector.is_exhausted


@pytest.mark.parametrize("reward", [0.35, 0.1, 1 / 3])
def test_a_constant_group_carries_no_signal_whatever_its_rounding(reward: float) -> None:
    collector, _ = make({0: (reward, reward), 1: (reward, None), 2: (None, None)})
    assert groups(collector.collect(1)) == [3, 4]


@pytest.mark.parametrize(("metric", "expected"), [("accuracy", [1, 2]), ("reward", [0, 1])])
def test_signal_is_judged_before_or_after_shaping(metric: str, expected: list[int]) -> None:
    collector, roles = make({0: (1.0, 1.0)}, metric=metric)
    collector.shaper = RewardShaper(RewardConfig(overlong_penalty=1.0, overlong_buffer_tokens=1), 2)

    def submit(prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        """The second sample of each prompt is truncated at the limit of two tokens; the first ends earlier."""
        responses = [(5,), (5, 6)]
        return [make_rollout(p.ids, responses[n], group=p.group_id, text=str(n)) for p in prompts for n in range(2)]

    roles.submit = submit  # type: ignore[method-assign]
    collected = collector.collect(1)
    assert groups(collected) == expected
    assert collected.batch.rewards.tolist()[1] == collected.batch.accuracies.tolist()[1] - 1


def test_greedy_baselines_are_sampled_only_where_the_estimator_asks() -> None:
    collector, roles = make({}, "remax", dynamic=False)
    collected = collector.collect(1)
    assert collected.batch.baselines.tolist() == [0.25] * 4
    assert [(sampling.samples, sampling.temperature) for _, sampling in roles.asked] == [(2, 1.0), (1, 0.0)]
    assert [ids for ids, _ in roles.asked] == [[0, 1], [0, 1]]
    assert counts(collected) == (4, 0, 0, 0)  # a baseline does not count as a sample

    collector, roles = make({}, "grpo", dynamic=False)
    assert collector.collect(1).batch.baselines.isnan().all()
    assert len(roles.asked) == 1


def test_sampling_settings_reach_the_engine() -> None:
    collector, roles = make({}, dynamic=False)
    collector.config.rollout.top_p, collector.config.rollout.top_k, collector.config.rollout.temperature = 0.9, 7, 0.5
    collector.collect(1)
    [(_, sampling)] = roles.asked
    assert (sampling.top_p, sampling.top_k, sampling.temperature) == (0.9, 7, 0.5)
