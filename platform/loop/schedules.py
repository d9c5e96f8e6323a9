"""Learning-rate schedules: the factor of the learning rate at each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from tandem.platform.config.schema import Config, ConfigError, OptimizerConfig


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def rate_factor(optimizer: OptimizerConfig) -> Callable[[int], float]:
    r"""The factor of `lr` at each optimizer step, counted from 0.

    With W = lr_warmup_steps, T = lr_total_steps and m = lr_min_ratio, the factor is (t + 1) / W for t < W. After that it is
    1 (constant), or m + (1 - m) f((t - S) / (T - S)) with f(p) = 1 - p (linear, wsd) or (1 + cos(pi p)) / 2 (cosine:
    Loshchilov & Hutter, https://arxiv.org/abs/1608.03983, eq. 5). From T on it is m. The decay starts at S = W, or for wsd
    (warm-up, stable, decay: Hu et al., https://arxiv.org/abs/2404.06395, sec. 4) at S = T - lr_decay_fraction (T - W).
    """
    warmup, kind, floor = optimizer.lr_warmup_steps, optimizer.lr_schedule, optimizer.lr_min_ratio
    if kind == "constant":
        return lambda step: min(1.0, (step + 1) / max(warmup, 1))
    assert optimizer.lr_total_steps is not None, "filled in by `with_total_steps`"
    total = optimizer.lr_total_steps
    start = total - optimizer.lr_decay_fraction * (total - warmup) if kind == "wsd" else warmup
    shape = _cosine if kind == "cosine" else _linear

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(max((step - start) / (total - start), 0.0), 1.0)
        return floor + (1.0 - floor) * shape(progress)

    return factor


def with_total_steps(config: Config, steps: int, has_critic: bool) -> Config:
    """The configuration with `lr_total_steps` of actor and critic filled in where it is null: the run's optimizer steps.

    Args:
        steps: training steps of the run.

    Raises:
        ConfigError: a schedule ends before its warm-up.
    """
    if problems := list(schedule_problems(config, steps, has_critic)):
        raise ConfigError("\n".join(problems))
    totals = _total_steps(config, steps, has_critic)
    actor = replace(config.actor, lr_total_steps=totals["actor"])
    critic = replace(config.critic, lr_total_steps=totals.get("critic"))
    return replace(config, actor=actor, critic=critic)


def schedule_problems(config: Config, steps: int, has_critic: bool) -> Iterator[str]:
    """Yields the problems of the learning-rate schedules in a run of `steps` training steps."""
    for role, total in _total_steps(config, steps, has_critic).items():
        optimizer = getattr(config, role)
        if optimizer.lr_schedule != "constant" and total <= optimizer.lr_warmup_steps:
            yield (
                f"{role}.lr_warmup_steps={optimizer.lr_warmup_steps} takes all {total} optimizer steps, so "
                f"{role}.lr_schedule={optimizer.lr_schedule} has no step left to decay. "
                f"Set {role}.lr_warmup_steps={max(total - 1, 0)} or less"
            )


def _total_steps(config: Config, steps: int, has_critic: bool) -> dict[str, int]:
    """Optimizer steps by role. The actor makes none during `critic.warmup_steps`."""
    minibatches, alone = config.train.minibatches, config.critic.warmup_steps if has_critic else 0
    updates = max(steps - alone, 0) * config.train.epochs_per_batch * minibatches
    totals = {"actor": config.actor.lr_total_steps or updates}
    if has_critic:
        totals["critic"] = config.critic.lr_total_steps or steps * config.critic_epochs * minibatches
    return totals
