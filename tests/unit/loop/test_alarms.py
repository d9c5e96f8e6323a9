"""Alarms: each warns once, when its metrics have been wrong for long enough."""

from __future__ import annotations

import math

import pytest

from tandem.platform.config.schema import Config
from tandem.platform.loop.alarms import alarms

WELL = {
    "reward/std": 0.1,
    "reward/mean": 0.5,
    "critic/explained_variance": 0.2,
    "rollout/logprob_gap": 1e-6,
    "rollout/staleness_mean": 0.0,
    "policy/grad_norm": 1.0,
    "policy/lr": 1e-6,
    "reward/unscorable": 1.0,
    "samples/sampled": 8.0,
}


def spoken(steps: int, wrong: dict[str, float], unmoved: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """(step, text) of all warnings while some metrics are wrong."""
    watching = alarms(Config())
    return [
        (step, text)
        for step in range(1, steps + 1)
        for alarm in watching
        if (text := alarm({**WELL, **wrong}, unmoved)) is not None
    ]


def test_all_is_well() -> None:
    assert spoken(50, {}) == []


@pytest.mark.parametrize(
    ("wrong", "step", "words"),
    [
        ({"reward/std": 0.0, "reward/mean": 0.25}, 10, "same reward (0.25)"),
        ({"critic/explained_variance": -0.5}, 20, "critic.warmup_steps"),
        ({"rollout/logprob_gap": 0.4}, 3, "Set algo.correction=truncate"),
        ({"rollout/logprob_gap": math.nan}, 3, "by nan nats"),
        ({"reward/unscorable": 8.0, "reward/unscorable_timeout": 8.0}, 3, "no sample could be scored"),
    ],
)
def test_each_alarm_speaks_once(wrong: dict[str, float], step: int, words: str) -> None:
    [(when, text)] = spoken(60, wrong)
    assert when == step
    assert words in text


def test_an_alarm_starts_anew_when_all_is_well_between() -> None:
    watching = alarms(Config())
    flat, said = {**WELL, "reward/std": 0.0}, []
    for step in range(30):
        said += [alarm(WELL if step == 9 else flat, frozenset()) for alarm in watching]
    assert len([text for text in said if text]) == 1


def test_what_was_not_measured_is_no_zero() -> None:
    """Steps without any score trigger no warning about rewards, only the warning that no sample could be scored."""
    unscored = {name: value for name, value in WELL.items() if not name.startswith("reward/")}
    unscored |= {"reward/unscorable": 8.0, "reward/unscorable_none": 8.0}
    watching = alarms(Config())
    said = [text for _ in range(40) for alarm in watching if (text := alarm(unscored, frozenset()))]
    [text] = said
    assert "no sample could be scored" in text
    assert "none 8" in text
    assert all(alarm({}, frozenset()) is None for _ in range(40) for alarm in alarms(Config()))


@pytest.mark.parametrize(
    ("top_p", "top_k", "correction", "advice"),
    [
        (1.0, None, "none", "Set algo.correction=truncate"),
        (0.9, None, "none", "Set rollout.top_p=1 and algo.correction=truncate"),
        (0.9, 5, "none", "Set rollout.top_p=1 and rollout.top_k=null and algo.correction=truncate"),
        (1.0, None, "mask", "Look at model.dtype"),
    ],
)
def test_the_advice_against_a_gap_suits_the_settings(top_p: float, top_k: int | None, correction: str, advice: str) -> None:
    config = Config()
    config.rollout.top_p, config.rollout.top_k, config.algo.correction = top_p, top_k, correction
    said = [text for alarm in alarms(config) for _ in range(3) if (text := alarm({**WELL, "rollout/logprob_gap": 1}, ()))]
    assert len(said) == 1
    assert advice in said[0]


def test_stale_samples_may_differ_from_the_trainer() -> None:
    assert spoken(9, {"rollout/logprob_gap": 0.4, "rollout/staleness_mean": 1.0}) == []


def test_tensors_that_stand_still_are_named() -> None:
    names = frozenset({"actor: b", "actor: a", "actor: d", "actor: c"})
    [(step, text)] = spoken(9, {}, names)
    assert step == 5
    assert "4 trainable tensors: actor: a, actor: b, actor: c and 1 more" in text
    assert spoken(9, {"policy/grad_norm": 0.0}, names) == []  # there was nothing to learn from
    assert spoken(9, {"policy/lr": 0.0}, names) == []


def test_tensors_that_stand_still_by_turns_are_not_named() -> None:
    """An expert that receives none of a step's tokens does not change in that step, which is not a fault."""
    watching = alarms(Config())
    turns = [{"actor: a", "actor: b"}, {"actor: b", "actor: c"}]
    said = [text for step in range(9) for alarm in watching if (text := alarm(WELL, turns[step % 2]))]
    assert ["1 trainable tensors: actor: b. " in text for text in said] == [True]
    watching = alarms(Config())
    assert [alarm(WELL, {f"actor: {step % 2}"}) for step in range(9) for alarm in watching] == [None] * 9 * len(watching)
