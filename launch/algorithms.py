"""Prints the table of algorithms: `python launch/algorithms.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import wrap

from tandem.launch.compose.command import command
from tandem.platform.algorithms.registry import Algorithm, algorithm_of
from tandem.platform.config.schema import Config
from tandem.platform.system.terminal import say
from tandem.platform.system.text import table

USAGE = """usage: python launch/algorithms.py

Prints a table of the algorithms with their components and papers."""
HEAD = ["algo", "critic", "adv_estimator", "policy_loss", "clip", "aggregation"]
WIDTH, INDENT = 112, " " * 8


def algorithms_table() -> str:
    """For each file of `conf/algo/`, a line with its components, and a second line with other switches and its paper."""
    import tandem.conf

    files = sorted((Path(tandem.conf.__file__).parent / "algo").glob("*.yaml"))
    configs = [_config(file) for file in files]
    head, *lines = table([HEAD, *(_row(config) for config in configs)], indent="").splitlines()
    return "\n".join([head, *(f"{line}\n{_details(config)}" for line, config in zip(lines, configs, strict=True))])


def _config(file: Path) -> Config:
    """The schema's defaults, overridden by the file."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(file)))
    assert isinstance(config, Config)
    return config


def _row(config: Config) -> list[str]:
    algo = config.algo
    algorithm = algorithm_of(config)
    clips = any(key.startswith("algo.clip_ratio") for key in algorithm.objective.reads)
    return [
        algo.name,
        "yes" if algorithm.needs_critic else "no",
        config.adv_estimator,
        algo.policy_loss,
        f"{algo.clip_ratio_low:g} / {algo.clip_ratio_high:g}" if clips else "none",
        algo.loss_aggregation,
    ]


def _details(config: Config) -> str:
    algorithm = algorithm_of(config)
    parts = [*_beyond(config, algorithm), config.algo.paper]
    return "\n".join(wrap("; ".join(filter(None, parts)), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))


def _beyond(config: Config, algorithm: Algorithm) -> list[str]:
    """Descriptions of the other switches that an algorithm turns on."""
    algo, critic = config.algo, config.critic
    switches = [
        (algo.kl_reward_coef > 0, f"KL in the reward ({algo.kl_reward_estimator}, {algo.kl_reward_coef:g})"),
        (algo.kl_loss_coef > 0, f"KL in the loss ({algo.kl_loss_estimator}, {algo.kl_loss_coef:g})"),
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
