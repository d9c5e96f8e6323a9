"""Which values a setting with choices takes: those of its registry where there is one, else those of its declaration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tandem.platform.algorithms.kl import KL_ESTIMATORS
from tandem.platform.algorithms.losses import AGGREGATIONS
from tandem.platform.algorithms.registry import ESTIMATORS, POLICY_LOSSES
from tandem.platform.data.tasks import TASKS

REGISTRIES: Mapping[str, Collection[str]] = {
    "adv_estimator": ESTIMATORS,
    "algo.policy_loss": POLICY_LOSSES,
    "algo.kl_reward_estimator": KL_ESTIMATORS,
    "algo.kl_loss_estimator": KL_ESTIMATORS,
    "algo.kl_loss_gradient": KL_ESTIMATORS,
    "algo.loss_aggregation": AGGREGATIONS,
    "task.name": TASKS,
}
"""By setting, what its values name."""


def choices_of(key: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that a setting takes besides `path.py:name`; empty if any value of its type will do.

    Args:
        metadata: of its declaration, see `setting`.
    """
    return tuple(REGISTRIES.get(key) or metadata.get("choices") or ())
