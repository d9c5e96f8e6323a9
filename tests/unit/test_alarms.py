"""Alarms: each speaks once, when its numbers have been wrong for long enough."""

from __future__ import annotations

import pytest

from tandem.platform.alarms import alarms

WELL = {
    "reward/std": 0.1,
    "reward/mean": 0.5,
    "critic/explained_variance": 0.2,
    "rollout/logprob_gap": 1e-6,
    "rollout/staleness_mean": 0.0,
    "policy/grad_norm": 1.0,
    "policy/lr": 1e-6,
}


def spoken(steps: int, wrong: dict[str, float], unmoved: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    """(step, text) of what all alarms say while some numbers are wrong."""
    watching = alarms()
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
        ({"rollout/logprob_gap": 0.4}, 3, "rollout.top_p"),
    ],
)
def test_each_alarm_speaks_once(wrong: dict[str, float], step: int, words: str) -> None:
    [(when, text)] = spoken(60, wrong)
    assert when == step
    assert words in text


def test_an_alarm_starts_anew_when_all_is_well_between() -> None:
    watching = alarms()
    flat, said = {**WELL, "reward/std": 0.0}, []
    for step in range(30):
        said += [alarm(WELL if step == 9 else flat, frozenset()) for alarm in watching]
    assert len([text for text in said if text]) == 1


def test_stale_samples_may_differ_from_the_trainer() -> None:
    assert spoken(9, {"rollout/logprob_gap": 0.4, "rollout/staleness_mean": 1.0}) == []


def test_tensors_that_stand_still_are_named() -> None:
    names = frozenset({"actor: b", "actor: a", "actor: d", "actor: c"})
    [(step, text)] = spoken(9, {}, names)
    assert step == 5
    assert "4 trainable tensors: actor: a, actor: b, actor: c and 1 more" in text
    assert spoken(9, {"policy/grad_norm": 0.0}, names) == []  # there was nothing to learn from
    assert spoken(9, {"policy/lr": 0.0}, names) == []
