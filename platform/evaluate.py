"""Evaluation on held-out prompts.

All numbers are means over prompts; each comes with a 95 % interval by bootstrap over prompts, as `..._low` and `..._high`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch

from tandem.platform.batch import Prompt, Rollout, Score
from tandem.platform.grading import last_box
from tandem.platform.metrics import Metrics
from tandem.platform.protocols import Roles, Sampling
from tandem.platform.seeds import mix

EVAL_STREAM = 2  # part of the seed, so that evaluating never changes what training samples
RESAMPLES, CONFIDENCE = 1000, 0.95
DETAILS = ("_low", "_high", "_length_mean", "_truncated_frac", "_unscorable")
"""Endings of what stands beside a number."""


@dataclass(frozen=True)
class Evaluation:
    """One named held-out set and how it is sampled."""

    name: str
    prompts: Sequence[Prompt]
    max_tokens: int
    samples_per_prompt: int  # sampled responses beside the greedy one; 0: none
    temperature: float
    top_p: float = 1.0
    top_k: int | None = None

    def run(self, roles: Roles, seed: int, step: int) -> Metrics:
        """`eval/<name>/greedy`, and with k sampled responses to a prompt besides:

            mean          of their rewards
            pass@n        expected best reward of n of them, for n = 2, 4, ... up to k; where rewards are 0 and 1, the
                          unbiased estimator of Chen et al., section 2.1, https://arxiv.org/abs/2107.03374
            majority@k    reward of the answer that most of them give

        Each with its interval; greedy and mean with `_length_mean`, `_truncated_frac` and `_unscorable`. Responses that
        cannot be scored count as 0.
        """
        metrics: Metrics = {}
        for key, sampling in self._samplings(seed, step).items():
            rollouts = roles.rollouts.collect(roles.rollouts.submit(self.prompts, sampling))
            metrics |= self._measure(key, rollouts, roles.rewards.score(rollouts), sampling.samples)
        return metrics

    def _samplings(self, seed: int, step: int) -> dict[str, Sampling]:
        stream = (seed, EVAL_STREAM, step)
        samplings = {"greedy": Sampling(1, 0.0, self.max_tokens, stream)}
        if self.samples_per_prompt:
            count, cuts = self.samples_per_prompt, (self.top_p, self.top_k)
            samplings["mean"] = Sampling(count, self.temperature, self.max_tokens, stream, *cuts)
        return samplings

    def _measure(self, key: str, rollouts: Sequence[Rollout], scores: Sequence[Score], k: int) -> Metrics:
        """What `k` responses to each prompt, side by side, say."""
        rewards = [score.reward or 0.0 for score in scores]
        by_prompt = [rewards[start : start + k] for start in range(0, len(rewards), k)]
        values = {key: [sum(of_one) / k for of_one in by_prompt]}
        if k > 1:
            for n in sorted({*(2**power for power in range(1, k.bit_length()) if 2**power <= k), k}):
                values[f"pass@{n}"] = [best_of(of_one, n) for of_one in by_prompt]
            answers = [answer_of(rollout.response_text) for rollout in rollouts]
            values[f"majority@{k}"] = [
                majority(answers[number * k : (number + 1) * k], of_one) for number, of_one in enumerate(by_prompt)
            ]
        metrics: Metrics = {}
        for name, of_prompts in values.items():
            low, high = interval(of_prompts)
            metrics |= {name: sum(of_prompts) / len(of_prompts), f"{name}_low": low, f"{name}_high": high}
        metrics |= {
            f"{key}_length_mean": sum(len(rollout.response_ids) for rollout in rollouts) / len(rollouts),
            f"{key}_truncated_frac": sum(rollout.stop.is_truncated for rollout in rollouts) / len(rollouts),
            f"{key}_unscorable": float(sum(score.reward is None for score in scores)),
        }
        return {f"eval/{self.name}/{name}": value for name, value in metrics.items()}


def best_of(rewards: Sequence[float], n: int) -> float:
    """Expected best of n of the rewards, drawn without repetition: sum_i x_(i) C(i-1, n-1) / C(k, n), x_(1) the smallest.

    With c of k rewards 1 and the others 0 it is 1 - C(k-c, n) / C(k, n).
    """
    assert 1 <= n <= len(rewards), f"the best of {n} of {len(rewards)}"
    ranked = sorted(rewards)
    return sum(value * comb(place, n - 1) for place, value in enumerate(ranked)) / comb(len(ranked), n)


def majority(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """The reward of the most frequent answer; of several, of the one given first."""
    winner, _ = Counter(answers).most_common(1)[0]
    return rewards[answers.index(winner)]


def answer_of(response: str) -> str:
    """What a response answers: what stands in its last box, or all of it."""
    return (last_box(response) or response).strip()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper end of the bootstrap percentile interval of the mean; always the same for the same values."""
    draw = torch.Generator().manual_seed(mix(len(values)))
    sample = torch.tensor(values, dtype=torch.float64)
    rows = torch.randint(len(values), (RESAMPLES, len(values)), generator=draw)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(sample[rows].mean(dim=1), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
