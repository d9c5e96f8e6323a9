"""Alarms: what a run tells its user when its numbers say that something is wrong. None of them stops it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tandem.platform.metrics import Metrics


@dataclass
class Alarm:
    """Speaks once, when `is_wrong` has held for `after` steps in a row."""

    after: int
    is_wrong: Callable[[Metrics, Collection[str]], bool]
    text: Callable[[Metrics, Collection[str]], str]
    _streak: int = 0

    def __call__(self, metrics: Metrics, unmoved: Collection[str]) -> str | None:
        """What to tell the user after this step, if anything."""
        self._streak = self._streak + 1 if self.is_wrong(metrics, unmoved) else 0
        return self.text(metrics, unmoved) if self._streak == self.after else None


LARGEST_GAP = 0.1  # nats per token; numerics of another engine in bfloat16 stay well below


def alarms() -> list[Alarm]:
    """All of them, for one run."""
    return [
        Alarm(10, lambda metrics, _: metrics.get("reward/std", 0.0) == 0, _flat_reward),
        Alarm(20, lambda metrics, _: metrics.get("critic/explained_variance", 0.0) < 0, _negative_variance),
        Alarm(3, _wide_gap, _wide_gap_text),
        Alarm(5, lambda metrics, unmoved: bool(unmoved) and _moves(metrics), _unmoved),
    ]


def _flat_reward(metrics: Metrics, unmoved: Collection[str]) -> str:
    return (
        f"warning: in 10 steps every sample had the same reward ({metrics.get('reward/mean', 0.0):g}), so nothing can be "
        "learned. Look at samples/: does the reward function read what the model writes? "
        "rollout.max_response_tokens may cut the answer off"
    )


def _negative_variance(metrics: Metrics, unmoved: Collection[str]) -> str:
    return (
        f"warning: for 20 steps the critic's values have been worse than a constant (critic/explained_variance "
        f"{metrics['critic/explained_variance']:.2f}), so they add noise to the advantages. Set critic.warmup_steps to "
        "train it before the policy moves, critic.lr higher or lower, or an adv_estimator without a critic"
    )


def _wide_gap(metrics: Metrics, unmoved: Collection[str]) -> bool:
    return metrics.get("rollout/staleness_mean", 0.0) == 0 and metrics.get("rollout/logprob_gap", 0.0) > LARGEST_GAP


def _wide_gap_text(metrics: Metrics, unmoved: Collection[str]) -> str:
    return (
        f"warning: the log-probs of the rollout engine differ from the trainer's by {metrics['rollout/logprob_gap']:.2f} "
        "nats per token on average, with the same weights. The samples are those of another distribution than the one "
        "trained: look at rollout.top_p, rollout.top_k and model.dtype, or set algo.correction=truncate"
    )


def _moves(metrics: Metrics) -> bool:
    """Whether something else was updated, so that what stands still should have moved."""
    return any(metrics.get(f"{role}/grad_norm", 0.0) * metrics.get(f"{role}/lr", 0.0) > 0 for role in ("policy", "critic"))


def _unmoved(metrics: Metrics, unmoved: Collection[str]) -> str:
    names = sorted(unmoved)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"warning: in 5 steps no update has changed {len(names)} trainable tensors: {shown}. They get no gradient, or "
        "their learning rate is too small for model.dtype"
    )
