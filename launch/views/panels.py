"""The charts of a run, without metrics that the run's settings keep constant.

`still` depends only on the settings, not on the data, so the report can say why a curve is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.platform.algorithms.registry import ESTIMATORS


@dataclass(frozen=True)
class Panel:
    """A chart over training steps: a title, and the metric of each curve by its name in the legend."""

    title: str
    curves: Mapping[str, str]
    unit: str = ""
    zero: bool = False  # whether the axis begins at 0


@dataclass(frozen=True)
class Still:
    """Metrics that the settings of a run keep constant, and the reason."""

    keys: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Panels:
    """The panels of a run, and the reasons why others are missing."""

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
    """The metrics that these settings, by dotted key, keep constant. A missing or non-numeric setting keeps none constant.

    The ratio of an update compares with the policy before the update, even if an older policy drew the samples. It is 1 in
    the first optimizer step of a batch, also for stale samples, and can differ from 1 only in later steps.
    """
    constant = []
    if settings.get("train.minibatches") == 1 and settings.get("train.epochs_per_batch") == 1:
        critic_moves = settings.get("critic.epochs_per_batch") not in (None, 1)
        constant.append(
            Still(
                tuple(key for key in RATIO if not (critic_moves and key.startswith("critic/"))),
                "One optimizer step per batch: the old log-probs come from the policy that is updated, so the ratio is 1, "
                "and the clip fraction and the KL stay 0. Raise train.minibatches or train.epochs_per_batch for more steps",
            )
        )
    elif settings.get("algo.policy_loss") == "policy_gradient":
        constant.append(Still(("policy/clip_frac",), "algo.policy_loss=policy_gradient has no clip"))
    if settings.get("algo.kl_loss_coef") == 0 and settings.get("algo.kl_reward_coef") == 0:
        constant.append(
            Still(("policy/kl", "kl/sampled"), "algo.kl_loss_coef=0 and algo.kl_reward_coef=0: there is no KL term")
        )
    name = settings.get("adv_estimator")
    if isinstance(name, str) and name in ESTIMATORS and not ESTIMATORS[name].needs_critic:
        constant.append(Still(CRITIC, f"adv_estimator={name}: there is no critic"))
    if settings.get("rollout.samples_per_prompt") == 1:
        constant.append(Still(("group/zero_std_frac",), "One sample per prompt: no group can vary"))
    if settings.get("rollout.max_staleness") == 0:
        constant.append(Still(("rollout/staleness_mean",), "rollout.max_staleness=0: the newest policy draws every sample"))
    return constant


def still_keys(settings: Mapping[str, Any]) -> frozenset[str]:
    """The metrics that these settings keep constant."""
    return frozenset(key for metrics in still(settings) for key in metrics.keys)


def panels(settings: Mapping[str, Any]) -> Panels:
    """The panels of a run with these settings; the run's records may lack data for some of them."""
    hidden, charted = still_keys(settings), {key for panel in PANELS for key in panel.curves.values()}
    kept = [replace(panel, curves={n: key for n, key in panel.curves.items() if key not in hidden}) for panel in PANELS]
    return Panels(
        [panel for panel in kept if panel.curves],
        [f"{', '.join(key for key in metrics.keys if key in charted)}. {metrics.why}" for metrics in still(settings)],
    )
