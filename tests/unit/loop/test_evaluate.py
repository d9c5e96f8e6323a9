"""The metrics that an evaluation reports for greedy and for sampled responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.platform.experience.batch import Prompt, Rollout, Score, StopReason
from tandem.platform.loop.evaluate import Evaluation, best_of, interval, majority
from tandem.platform.loop.protocols import Sampling
from tandem.platform.rewards.functions import RewardError, answer_of

PROMPTS = [Prompt((3,), 0, "a"), Prompt((4,), 1, "b")]


class Rollouts:
    """Samples three tokens for every prompt."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        one = {"response_ids": (5, 6, 1), "response_mask": (True,) * 3, "logprobs": (0.0,) * 3}
        return [
            Rollout(prompt, stop=StopReason.STOP, policy_version=0, response_text="", **one)  # type: ignore[arg-type]
            for prompt in prompts
            for _ in range(sampling.samples)
        ]

    def collect(self, ticket: Any) -> list[Rollout]:
        return list(ticket)


def evaluate(samples: int, *rewards: list[float | None]) -> dict[str, float]:
    """The metrics of an evaluation in which consecutive calls of the reward role return `rewards`."""
    left = list(rewards)
    scorer = SimpleNamespace(verify=lambda rollouts: [Score(reward) for reward in left.pop(0)])
    roles: Any = SimpleNamespace(rollouts=Rollouts(), rewards=scorer)
    return Evaluation("held", PROMPTS, 4, samples, 1.0).run(roles, seed=0, step=1)


def test_greedy_alone() -> None:
    metrics = evaluate(0, [1.0, 0.0])
    assert metrics == {
        "eval/held/greedy": 0.5,
        "eval/held/greedy_low": 0.0,  # two prompts have no score
        "eval/held/greedy_high": 1.0,
        "eval/held/greedy_unscorable": 0.0,
        "eval/held/greedy_truncated_frac": 0.0,
        "eval/held/greedy_length_mean": 3.0,
    }


def test_samples_are_cut_as_in_training_and_greedy_ones_are_not() -> None:
    asked: list[Sampling] = []

    class Asked(Rollouts):
        def submit(self, prompts: list[Prompt], sampling: Sampling) -> Any:
            asked.append(sampling)
            return super().submit(prompts, sampling)

    roles: Any = SimpleNamespace(rollouts=Asked(), rewards=SimpleNamespace(verify=lambda rows: [Score(1.0) for _ in rows]))
    Evaluation("held", PROMPTS, 4, 2, 0.7, top_p=0.9, top_k=5).run(roles, seed=3, step=1)
    assert [(one.samples, one.temperature, one.top_p, one.top_k) for one in asked] == [
        (1, 0.0, 1.0, None),
        (2, 0.7, 0.9, 5),
    ]


def test_sampled_responses() -> None:
    metrics = evaluate(3, [0.0, 0.0], [0.0, 1.0, 1.0, 0.0, None, 0.0])
    assert metrics["eval/held/mean"] == pytest.approx(2 / 6)
    assert metrics["eval/held/pass@2"] == 0.5  # any two of 0, 1, 1 have a 1
    assert metrics["eval/held/pass@3"] == 0.5
    assert metrics["eval/held/majority@3"] == 0.0  # all say the same, and the first of them is 0
    assert metrics["eval/held/mean_unscorable"] == 1.0


def test_one_sample_has_no_best() -> None:
    assert not [name for name in evaluate(1, [0.0, 0.0], [1.0, 0.0]) if "@" in name]


@pytest.mark.parametrize(("k", "c", "n"), [(10, 3, 1), (10, 3, 4), (10, 3, 8), (4, 0, 2), (4, 4, 4)])
def test_pass_at_n_is_the_unbiased_estimator(k: int, c: int, n: int) -> None:
    assert best_of([1.0] * c + [0.0] * (k - c), n) == pytest.approx(1 - comb(k - c, n) / comb(k, n))


def test_the_best_of_n_is_the_mean_over_all_choices() -> None:
    rewards = [0.3, -1.0, 2.0, 0.3, 0.5]
    for n in range(1, 6):
        choices = [max(choice) for choice in combinations(rewards, n)]
        assert best_of(rewards, n) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [(["7", "8", "8"], [1.0, 0.2, 0.2], 0.2), (["7", "8"], [1.0, 0.0], 1.0), (["8", "7", "9", "7"], [0, 1, 0, 1], 1)],
)
def test_the_majority_decides(answers: list[str], rewards: list[float], expected: float) -> None:
    assert majority(answers, rewards) == expected


def test_an_answer_is_what_stands_in_the_last_box() -> None:
    for verifier in (None, "boxed", "own"):
        assert answer_of(verifier, r"so \boxed{3}, no, \boxed{4}") == "4"
        assert answer_of(verifier, " 12 ") == "12"


def test_an_answer_is_what_the_verifier_reads() -> None:
    """The majority vote compares the answers that the verifier reads, so different wordings of an answer are equal."""
    assert answer_of("last_number", "I think 3, so 1,200.0") == answer_of("last_number", "1200 it is") != "1200 it is"
    assert answer_of("exact_match", r" \boxed{3} ") == r"\boxed{3}"


def test_accuracy_is_what_the_verifier_says_and_the_reward_stands_beside_it() -> None:
    right: list[float | None] = [1.0, 0.0, None, 1.0]
    scores = [Score(0.25 * n, parts={"boxed": value, "length": 9.0}) for n, value in enumerate(right)]
    scorer = SimpleNamespace(verify=lambda rollouts: scores)
    roles: Any = SimpleNamespace(rollouts=Rollouts(), rewards=scorer)

    def measured(**settings: Any) -> dict[str, float]:
        return Evaluation("held", PROMPTS * 2, 4, 0, 1.0, **settings).run(roles, seed=0, step=1)

    metrics = measured(verifier="boxed", with_reward=True)
    assert (metrics["eval/held/greedy"], metrics["eval/held/greedy_unscorable"]) == (0.5, 1)
    assert metrics["eval/held/reward"] == pytest.approx((0 + 0.25 + 0.5 + 0.75) / 4)
    assert measured()["eval/held/greedy"] == pytest.approx(0.375)
    assert "eval/held/reward" not in measured()
    with pytest.raises(RewardError, match=r"the verifier 'length' returned 9; .* Set eval\.function"):
        measured(verifier="length")


def test_the_interval_is_that_of_a_mean() -> None:
    """With 100 of 400 at 1: 0.25 +- 1.96 * sqrt(.25 * .75 / 400). A second call gives the same interval."""
    values = [1.0] * 100 + [0.0] * 300
    low, high = interval(values)
    assert (low, high) == (pytest.approx(0.2076, abs=0.006), pytest.approx(0.2924, abs=0.006))
    assert interval(values) == (low, high)
    assert interval([0.7]) == (0.7, 0.7)
