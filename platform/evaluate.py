"""Evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.platform.batch import Prompt
from tandem.platform.metrics import Metrics
from tandem.platform.protocols import Roles, Sampling

EVAL_STREAM = 2  # part of the seed, so that evaluating never changes what training samples


@dataclass(frozen=True)
class Evaluation:
    """One named held-out set and how it is sampled."""

    name: str
    prompts: Sequence[Prompt]
    max_tokens: int
    samples_per_prompt: int  # sampled responses beside the greedy one; 0: none
    temperature: float

    def run(self, roles: Roles, seed: int, step: int) -> Metrics:
        """`eval/<name>/greedy`: mean reward of greedy responses; `eval/<name>/mean`: of sampled ones, k to a prompt;
        `eval/<name>/pass@<k>`: mean over prompts of the best of its k, the share solved where rewards are 0 and 1.

        Unscorable responses count as 0, and are counted.
        """
        metrics = self._measure(roles, "greedy", Sampling(1, 0.0, self.max_tokens, (seed, EVAL_STREAM, step)))
        if self.samples_per_prompt:
            sampling = Sampling(self.samples_per_prompt, self.temperature, self.max_tokens, (seed, EVAL_STREAM, step))
            metrics |= self._measure(roles, "mean", sampling)
        return metrics

    def _measure(self, roles: Roles, key: str, sampling: Sampling) -> Metrics:
        rollouts = roles.rollouts.collect(roles.rollouts.submit(self.prompts, sampling))
        scores = roles.rewards.score(rollouts)
        rewards = [score.reward or 0.0 for score in scores]
        k = sampling.samples
        best = [max(rewards[start : start + k]) for start in range(0, len(rewards), k)]
        return {
            f"eval/{self.name}/{key}": sum(rewards) / len(rewards),
            **({f"eval/{self.name}/pass@{k}": sum(best) / len(best)} if k > 1 else {}),
            f"eval/{self.name}/{key}_unscorable": float(sum(score.reward is None for score in scores)),
            f"eval/{self.name}/{key}_length_mean": sum(len(r.response_ids) for r in rollouts) / len(rollouts),
        }
