"""What an evaluation reports of greedy and of sampled responses."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.platform.batch import Prompt, Rollout, Score, StopReason
from tandem.platform.evaluate import Evaluation
from tandem.platform.protocols import Sampling

PROMPTS = [Prompt((3,), 0, "a"), Prompt((4,), 1, "b")]


class Rollouts:
    """Samples three tokens for everything."""

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
    """The metrics where one call of the reward role after the other gives `rewards`."""
    left = list(rewards)
    scorer = SimpleNamespace(score=lambda rollouts: [Score(reward) for reward in left.pop(0)])
    roles: Any = SimpleNamespace(rollouts=Rollouts(), rewards=scorer)
    return Evaluation("held", PROMPTS, 4, samples, 1.0).run(roles, seed=0, step=1)


def test_greedy_alone() -> None:
    assert evaluate(0, [1.0, 0.0]) == {
        "eval/held/greedy": 0.5,
        "eval/held/greedy_unscorable": 0.0,
        "eval/held/greedy_length_mean": 3.0,
    }


def test_sampled_responses_by_mean_and_by_the_best_of_each_prompt() -> None:
    metrics = evaluate(3, [0.0, 0.0], [0.0, 1.0, 1.0, 0.0, None, 0.0])
    assert metrics["eval/held/mean"] == pytest.approx(2 / 6)
    assert metrics["eval/held/pass@3"] == 0.5
    assert metrics["eval/held/mean_unscorable"] == 1.0


def test_one_sample_has_no_best() -> None:
    assert not [name for name in evaluate(1, [0.0, 0.0], [1.0, 0.0]) if "pass@" in name]
