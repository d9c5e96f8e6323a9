"""What of a run is charted, and what is not because its settings hold it still.

`still` decides by the settings, not by the data, so that it can be told why a curve is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.platform.algorithms.registry import ESTIMATORS


@dataclass(frozen=True)
class Panel:
    """A chart over training steps: a title for people, and by its name in the legend the metric of each curve."""

    title: str
    curves: Mapping[str, str]
    unit: str = ""
    zero: bool = False  # whether the axis begins at 0


@dataclass(frozen=True)
class Still:
    """Metrics that cannot move under the settings of a run, and why."""

    keys: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Panels:
    """The panels of a run, and the reasons for those that it lacks."""

    shown: Sequence[Panel]
    reasons: Sequence[str] = field(default_factory=tuple)


PANELS = (
    Panel("Reward", {"mean": "reward/mean"}),
    Panel("KL to the reference policy", {"in the loss": "policy/kl", "at sampling": "kl/sampled"}, "nats per token"),
    Panel("KL to the policy before the step", {"estimate": "policy/approx_kl"}, "nats per token"),
    Panel("Clipped tokens", {"share": "policy/clip_frac"}, "share of tokens"),
    Panel("Largest ratio of probabilities", {"maximum": "policy/ratio_max"}),
    Panel("Entropy", {"mean": "policy/entropy"}, "nats per token"),
    Panel("Response length", {"mean": "response/length_mean", "longest": "response/length_max"}, "tokens", zero=True),
    Panel("Responses cut off by the limit", {"share": "response/truncated_frac"}, "share of responses"),
    Panel("Groups without signal", {"share": "group/zero_std_frac"}, "share of prompts"),
    Panel("Explained variance of the critic", {"share": "critic/explained_variance"}),
    Panel("Sampler against trainer", {"gap": "rollout/logprob_gap"}, "nats per token"),
    Panel("Policy versions behind", {"mean": "rollout/staleness_mean"}, "updates", zero=True),
    Panel("Gradient norm", {"policy": "policy/grad_norm", "critic": "critic/grad_norm"}),
    Panel("Throughput", {"mean": "tokens/response_per_s"}, "response tokens per second", zero=True),
)
RATIO = ("policy/approx_kl", "policy/clip_frac", "policy/ratio_max", "policy/ratio_gap_max", "critic/clip_frac")
CRITIC = ("critic/explained_variance", "critic/grad_norm", "critic/loss")


def still(settings: Mapping[str, Any]) -> list[Still]:
    """What cannot move under settings by their dotted keys; one that is missing or no number holds nothing still.

    The ratio of an update is to the policy before the update, whoever sampled: it is 1 in the first optimizer step of a
    batch, also for stale samples, and differs from 1 in later ones alone.
    """
    found = []
    if settings.get("train.minibatches") == 1 and settings.get("train.epochs_per_batch") == 1:
        found.append(
            Still(
                RATIO,
                "One optimizer step per batch: the policy of the old log-probs is the policy that is trained, so the ratio "
                "is 1, and clip and KL to it stay 0. train.minibatches or train.epochs_per_batch make more",
            )
        )
    elif settings.get("algo.policy_loss") == "policy_gradient":
        found.append(Still(("policy/clip_frac",), "algo.policy_loss=policy_gradient has no clip"))
    if settings.get("algo.kl_loss_coef") == 0 and settings.get("algo.kl_reward_coef") == 0:
        found.append(
            Still(("policy/kl", "kl/sampled"), "algo.kl_loss_coef=0 and algo.kl_reward_coef=0: there is no KL term")
        )
    name = settings.get("adv_estimator")
    if isinstance(name, str) and name in ESTIMATORS and not ESTIMATORS[name].needs_critic:
        found.append(Still(CRITIC, f"adv_estimator={name}: there is no critic"))
    if settings.get("rollout.samples_per_prompt") == 1:
        found.append(Still(("group/zero_std_frac",), "One sample per prompt: no group can vary"))
    if settings.get("rollout.max_staleness") == 0:
        found.append(Still(("rollout/staleness_mean",), "rollout.max_staleness=0: every sample is of the newest policy"))
    return found


def still_keys(settings: Mapping[str, Any]) -> frozenset[str]:
    """The metrics that cannot move under these settings."""
    return frozenset(key for one in still(settings) for key in one.keys)


def panels(settings: Mapping[str, Any]) -> Panels:
    """The panels of a run with these settings; which of them have data, only its records say."""
    hidden, charted = still_keys(settings), {key for one in PANELS for key in one.curves.values()}
    kept = [
        Panel(one.title, {name: key for name, key in one.curves.items() if key not in hidden}, one.unit, one.zero)
        for one in PANELS
    ]
    return Panels(
        [one for one in kept if one.curves],
        [f"{', '.join(key for key in one.keys if key in charted)}. {one.why}" for one in still(settings)],
    )
