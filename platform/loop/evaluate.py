"""Evaluation on held-out prompts.

All numbers are means over prompts. Each has a 95 % interval, `..._low` and `..._high`, from a bootstrap over prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch

from tandem.platform.experience.batch import Prompt, Rollout, Score
from tandem.platform.experience.metrics import HeldOut, Metrics
from tandem.platform.loop.protocols import Roles, Sampling
from tandem.platform.loop.seeds import mix
from tandem.platform.rewards.functions import RewardError, answer_of

EVAL_STREAM = 2  # part of the seed: evaluation never changes what training samples
RESAMPLES, CONFIDENCE = 1000, 0.95  # of the bootstrap interval


@dataclass(frozen=True)
class Evaluation:
    """One named held-out set and how it is sampled."""

    name: str
    prompts: Sequence[Prompt]
    max_tokens: int
    samples_per_prompt: int  # sampled responses in addition to the greedy one; 0: none
    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    verifier: str | None = None  # part of a score that says whether a response is correct; None: measure the reward
    with_reward: bool = False  # also measure the training reward, where it differs from the verifier

    def run(self, roles: Roles, seed: int, step: int) -> Metrics:
        """Measures `eval/<name>/greedy` and, with k sampled responses per prompt, also `eval/<name>/...`:

            mean          mean value of the responses
            pass@n        expected best value of n responses, for n = 2, 4, ... up to k; if the values are 0 and 1, this is
                          the unbiased estimator of Chen et al., section 2.1, https://arxiv.org/abs/2107.03374
            majority@k    value of the most frequent answer; the verifier defines how an answer is read

        The value of a response is the verifier's, or its reward without a verifier. Each metric has its interval; greedy
        and mean also have `_length_mean`, `_truncated_frac` and `_unscorable`. `eval/<name>/reward` is the mean reward of
        the greedy responses. Responses that cannot be scored count as 0.

        Raises:
            RewardError: the verifier gave a value outside [0, 1].
        """
        metrics: Metrics = {}
        for key, sampling in self._samplings(seed, step).items():
            rollouts = roles.rollouts.collect(roles.rollouts.submit(self.prompts, sampling))
            scores = roles.rewards.verify(rollouts)
            metrics |= self._measure(key, rollouts, scores, sampling.samples)
            if key == "greedy" and self.with_reward:
                metrics[HeldOut(self.name, "reward").key] = sum(score.reward or 0.0 for score in scores) / len(scores)
        return metrics

    def _samplings(self, seed: int, step: int) -> dict[str, Sampling]:
        stream = (seed, EVAL_STREAM, step)
        samplings = {"greedy": Sampling(1, 0.0, self.max_tokens, stream)}
        if self.samples_per_prompt:
            count, cuts = self.samples_per_prompt, (self.top_p, self.top_k)
            samplings["mean"] = Sampling(count, self.temperature, self.max_tokens, stream, *cuts)
        return samplings

    def _measure(self, key: str, rollouts: Sequence[Rollout], scores: Sequence[Score], k: int) -> Metrics:
        """Metrics of `k` responses per prompt, which are adjacent in `rollouts` and `scores`."""
        scored = [self._value(score) for score in scores]
        known = [value or 0.0 for value in scored]
        by_prompt = [known[start : start + k] for start in range(0, len(known), k)]
        values = {key: [sum(of_prompt) / k for of_prompt in by_prompt]}
        if k > 1:
            for n in sorted({*(2**power for power in range(1, k.bit_length()) if 2**power <= k), k}):
                values[f"pass@{n}"] = [best_of(of_prompt, n) for of_prompt in by_prompt]
            answers = [answer_of(self.verifier, rollout.response_text) for rollout in rollouts]
            values[f"majority@{k}"] = [
                majority(answers[number * k : (number + 1) * k], of_prompt) for number, of_prompt in enumerate(by_prompt)
            ]
        metrics: Metrics = {}
        for name, of_prompts in values.items():
            low, high = interval(of_prompts)
            metrics |= {name: sum(of_prompts) / len(of_prompts), f"{name}_low": low, f"{name}_high": high}
        metrics |= {
            f"{key}_length_mean": sum(len(rollout.response_ids) for rollout in rollouts) / len(rollouts),
            f"{key}_truncated_frac": sum(rollout.stop.is_truncated for rollout in rollouts) / len(rollouts),
            f"{key}_unscorable": float(sum(value is None for value in scored)),
        }
        return {HeldOut(self.name, name).key: value for name, value in metrics.items()}

    def _value(self, score: Score) -> float | None:
        if self.verifier is None:
            return score.reward
        value = score.parts.get(self.verifier)
        if value is not None and not 0 <= value <= 1:
            raise RewardError(
                f"the verifier {self.verifier!r} returned {value:g}; held-out accuracy needs numbers from 0 (wrong) to 1 "
                "(right). Set eval.function to a function that returns such numbers"
            )
        return value


def best_of(rewards: Sequence[float], n: int) -> float:
    """Expected maximum of n rewards drawn without replacement: sum_i x_(i) C(i-1, n-1) / C(k, n), x_(1) the smallest.

    If c of k rewards are 1 and the others 0, this is 1 - C(k-c, n) / C(k, n).
    """
    assert 1 <= n <= len(rewards), f"the best of {n} of {len(rewards)}"
    ranked = sorted(rewards)
    return sum(value * comb(place, n - 1) for place, value in enumerate(ranked)) / comb(len(ranked), n)


def majority(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """The reward of the most frequent answer; in a tie, of the answer that occurs first."""
    winner, _ = Counter(answers).most_common(1)[0]
    return rewards[answers.index(winner)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper end of the bootstrap percentile interval of the mean; deterministic for the same values."""
    draw = torch.Generator().manual_seed(mix(len(values)))
    sample = torch.tensor(values, dtype=torch.float64)
    rows = torch.randint(len(values), (RESAMPLES, len(values)), generator=draw)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(sample[rows].mean(dim=1), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
