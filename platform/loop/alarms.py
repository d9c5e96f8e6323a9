"""Alarms: warnings to the user when the metrics of a run show a problem. No alarm stops the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from tandem.platform.config.schema import Config
from tandem.platform.experience.metrics import Metrics


@dataclass
class Alarm:
    """Warns once, when `is_wrong` has held for `after` steps in a row. Steps that lack one of its metrics are skipped.

    A tensor counts as unmoved if none of these steps has changed it.
    """

    after: int
    reads: Collection[str]  # metrics
    is_wrong: Callable[[Metrics, Collection[str]], bool]
    text: Callable[[Metrics, Collection[str]], str]
    _streak: int = 0
    _unmoved: frozenset[str] = frozenset()

    def __call__(self, metrics: Metrics, unmoved: Collection[str]) -> str | None:
        """The warning to show after this step, if any."""
        if any(name not in metrics for name in self.reads):
            return None
        self._unmoved = self._unmoved.intersection(unmoved) if self._streak else frozenset(unmoved)
        self._streak = self._streak + 1 if self.is_wrong(metrics, self._unmoved) else 0
        return self.text(metrics, self._unmoved) if self._streak == self.after else None


VARIANCE = "critic/explained_variance"
LARGEST_GAP = 0.1  # nats per token; numerics of another engine in bfloat16 stay well below


def alarms(config: Config) -> list[Alarm]:
    """All alarms of a run, with advice that fits its settings."""
    return [
        Alarm(10, ["reward/std"], lambda metrics, _: metrics["reward/std"] == 0, _flat_reward),
        Alarm(3, ["reward/unscorable", "samples/sampled"], _nothing_scored, _nothing_scored_text),
        Alarm(20, [VARIANCE], lambda metrics, _: metrics[VARIANCE] < 0, _negative_variance),
        Alarm(3, ["rollout/logprob_gap", "rollout/staleness_mean"], _wide_gap, partial(_wide_gap_text, config)),
        Alarm(5, [], lambda metrics, unmoved: bool(unmoved) and _moves(metrics), _unmoved),
    ]


def _flat_reward(metrics: Metrics, unmoved: Collection[str]) -> str:
    return (
        f"warning: for 10 steps all samples had the same reward ({metrics['reward/mean']:g}), so the policy cannot "
        "learn. Look at samples/: does the reward function read what the model writes? "
        "rollout.max_response_tokens may cut the answer off"
    )


def _nothing_scored(metrics: Metrics, unmoved: Collection[str]) -> bool:
    return metrics["reward/unscorable"] >= metrics["samples/sampled"] > 0


def _nothing_scored_text(metrics: Metrics, unmoved: Collection[str]) -> str:
    counts = {name.removeprefix("reward/unscorable_"): n for name, n in metrics.items() if "unscorable_" in name}
    problems = ", ".join(f"{name} {count:.0f}" for name, count in sorted(counts.items())) or "unnamed problem"
    return (
        f"warning: for 3 steps no sample could be scored, so nothing was trained (in the last step: {problems}). Look at "
        "samples/ and at what the reward functions return; they time out after reward.timeout_s"
    )


def _negative_variance(metrics: Metrics, unmoved: Collection[str]) -> str:
    return (
        f"warning: for 20 steps the critic's values have been worse than a constant (critic/explained_variance "
        f"{metrics['critic/explained_variance']:.2f}), so they add noise to the advantages. Set critic.warmup_steps to "
        "train the critic before the policy, change critic.lr, or set an adv_estimator without a critic"
    )


def _wide_gap(metrics: Metrics, unmoved: Collection[str]) -> bool:
    return metrics["rollout/staleness_mean"] == 0 and not metrics["rollout/logprob_gap"] <= LARGEST_GAP


def _wide_gap_text(config: Config, metrics: Metrics, unmoved: Collection[str]) -> str:
    return (
        f"warning: the log-probs of the rollout engine differ from the trainer's by {metrics['rollout/logprob_gap']:.2f} "
        "nats per token on average, with the same weights. The samples come from a different distribution than the "
        f"trained one. {against_another_sampler(config) or 'Look at model.dtype and rollout.engine'}"
    )


def _moves(metrics: Metrics) -> bool:
    """Whether a role had a nonzero update, so unmoved tensors should have changed."""
    return any(metrics.get(f"{role}/grad_norm", 0.0) * metrics.get(f"{role}/lr", 0.0) > 0 for role in ("policy", "critic"))


def _unmoved(metrics: Metrics, unmoved: Collection[str]) -> str:
    names = sorted(unmoved)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"warning: for 5 steps no update has changed {len(names)} trainable tensors: {shown}. They get no gradient, or "
        "their learning rate is too small for model.dtype"
    )


def against_another_sampler(config: Config) -> str:
    """Advice for samples from a different distribution than the trained one; empty if no setting is left to change."""
    steps = []
    if config.rollout.top_p < 1:
        steps.append("rollout.top_p=1")
    if config.rollout.top_k is not None:
        steps.append("rollout.top_k=null")
    if config.algo.correction == "none":
        steps.append("algo.correction=truncate")
    return f"Set {' and '.join(steps)}" if steps else ""
