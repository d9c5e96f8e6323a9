"""Prints the table of algorithms: `python launch/algorithms.py`."""

from __future__ import annotations

import sys

from tandem.launch.command import command
from tandem.launch.compose import compose, config_groups
from tandem.platform.algorithms import Algorithm, resolve
from tandem.platform.config import AlgoConfig, Config
from tandem.platform.plan import table
from tandem.platform.terminal import say

USAGE = """usage: python launch/algorithms.py

Prints a table of the algorithms: what each consists of, and its paper."""
HEAD = ["algo", "critic", "adv_estimator", "policy_loss", "clip", "KL", "aggregation", "beyond that", "paper"]


def algorithms_table() -> str:
    """One line per file of `conf/algo/`, read from the composed configuration and the records."""
    configs = [compose([f"algo={name}"])[0] for name in config_groups()["algo"]]
    return table([HEAD, *(_row(config) for config in configs)], indent="")


def _row(config: Config) -> list[str]:
    algo = config.algo
    algorithm = resolve(algo.name, config.adv_estimator, algo.policy_loss)
    clips = any(key.startswith("algo.clip_ratio") for key in algorithm.objective.reads)
    return [
        algo.name,
        "yes" if algorithm.needs_critic else "no",
        config.adv_estimator,
        algo.policy_loss,
        f"{algo.clip_ratio_low:g} / {algo.clip_ratio_high:g}" if clips else "none",
        _kl(algo),
        algo.loss_aggregation,
        ", ".join(_beyond(config, algorithm)) or "-",
        algo.paper,
    ]


def _kl(algo: AlgoConfig) -> str:
    """Where the KL to the reference stands, with its estimator and coefficient."""
    places = []
    if algo.kl_reward_coef > 0:
        places.append(f"reward, {algo.kl_reward_estimator}, {algo.kl_reward_coef:g}")
    if algo.kl_loss_coef > 0:
        places.append(f"loss, {algo.kl_loss_estimator}, {algo.kl_loss_coef:g}")
    return "; ".join(places) or "none"


def _beyond(config: Config, algorithm: Algorithm) -> list[str]:
    """What else an algorithm turns on."""
    algo, critic = config.algo, config.critic
    switches = [
        (algorithm.estimator.needs_greedy, "greedy response per prompt"),
        (algo.whiten_advantages or algorithm.estimator.whitens, "advantages whitened"),
        (algo.lam_length_alpha is not None, f"lambda by length, alpha {algo.lam_length_alpha}"),
        (algo.dynamic_sampling, "dynamic sampling"),
        (algo.overlong_filter, "overlong filter"),
        (config.reward.overlong_penalty > 0, "soft overlong penalty"),
        (algo.positive_nll_coef > 0, f"NLL of right answers, {algo.positive_nll_coef:g}"),
        (algorithm.needs_critic and critic.warmup_steps > 0, f"critic alone for up to {critic.warmup_steps} steps"),
    ]
    return [text for on, text in switches if on]


@command("algorithms", USAGE)
def main(arguments: list[str]) -> int:
    """Prints the table."""
    say(algorithms_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
