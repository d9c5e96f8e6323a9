"""Builds the roles of a run: as Ray actors in placement groups, or in this process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.platform.algorithms.registry import Algorithm
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.loop.protocols import Roles
from tandem.platform.planning.plan import role_ranks
from tandem.platform.rewards.functions import verifier_of
from tandem.workers.cluster.cluster import usable_cpus
from tandem.workers.cluster.node_files import NodeFile
from tandem.workers.cluster.placement import Placement, Request, plan_placement
from tandem.workers.cluster.runtime import Rank
from tandem.workers.groups.inline import InlineRollouts
from tandem.workers.roles.actor import ActorSpec, ActorWorker
from tandem.workers.roles.critic import CriticSpec, CriticWorker
from tandem.workers.roles.reference import ReferenceSpec, ReferenceWorker
from tandem.workers.roles.reward import RewardRank, RewardSpec
from tandem.workers.roles.rollout import RolloutSpec, RolloutWorker

WORKERS: dict[str, Any] = {
    "rollout": RolloutWorker,
    "reward": RewardRank,
    "actor": ActorWorker,
    "reference": ReferenceWorker,
    "critic": CriticWorker,
}


def role_specs(config: Config, algorithm: Algorithm, path: str) -> dict[str, Any]:
    """The spec of each role that the run needs, by role. `path`: the model's folder or hub name."""
    budget, longest = config.train.microbatch_tokens, config.rollout.max_response_tokens
    timeout_s, temperature = config.cluster.call_timeout_s, config.rollout.temperature
    rollout = replace(config.rollout, max_model_tokens=config.rollout.max_model_tokens or config.max_sequence_tokens)
    specs: dict[str, Any] = {
        "rollout": RolloutSpec(path, config.model, rollout, algorithm.estimator.rewards_steps),
        "reward": RewardSpec(
            config.reward,
            path,
            config.model.trust_remote_code,
            verifier_of(config.eval.function, config.reward.functions),
        ),
        "actor": ActorSpec(
            path,
            config.model,
            config.actor,
            config.trainer,
            config.algo,
            temperature,
            longest,
            budget,
            timeout_s,
            config.run.seed,
        ),
    }
    if config.needs_reference:
        specs["reference"] = ReferenceSpec(path, config.model, temperature, budget)
    if algorithm.needs_critic:
        specs["critic"] = CriticSpec(
            config.critic.path or path,
            config.model,
            config.critic,
            config.trainer,
            config.algo.loss_aggregation,
            longest,
            budget,
            timeout_s,
            config.run.seed,
        )
    return specs


def files_of(config: Config, path: str, roles: Collection[str]) -> list[NodeFile]:
    """The files that ranks of these roles read by path, for a policy at `path`; excludes hub names."""
    rewards = config.reward
    functions = [*rewards.functions, rewards.function, verifier_of(config.eval.function, rewards.functions)]
    models = ("rollout", "actor", "reference", *(() if config.critic.path else ("critic",)))
    named = [
        ("model.path", path, (*models, "reward") if rewards.model else models),
        ("critic.path", config.critic.path, ("critic",)),
        ("reward.model", rewards.model, ("reward",)),
        ("algo.policy_loss", config.algo.policy_loss.rpartition(":")[0], ("actor",)),
        *(("reward.function", spec.rpartition(":")[0], ("reward",)) for spec in functions if spec and ":" in spec),
    ]
    files = {file: NodeFile(key, file, tuple(r for r in needs if r in roles)) for key, file, needs in named if file}
    return [file for file in files.values() if file.roles and Path(file.path).exists()]


def inline_workers(config: Config, algorithm: Algorithm, path: str) -> dict[str, Any]:
    """The workers of every role in this process, one rank each, with their models loaded."""
    rank = Rank(device=config.trainer.device)
    workers = {name: WORKERS[name](spec, rank) for name, spec in role_specs(config, algorithm, path).items()}
    for worker in workers.values():
        worker.start()
    return workers


def takes_turns(config: Config, on_gpu: bool) -> bool:
    """Whether engines and trained models take turns on their devices.

    Raises:
        ConfigError: they would take turns, but rollout.max_staleness asks for sampling during training.
    """
    asked = config.placement.takes_turns
    shared = (on_gpu and config.placement.name == "colocated") if asked is None else asked
    if shared and config.rollout.max_staleness > 0:
        raise ConfigError(
            "colocated engines sleep while models train, but rollout.max_staleness="
            f"{config.rollout.max_staleness} needs them to sample meanwhile. Set rollout.max_staleness=0 or placement=split"
        )
    return shared


def inline_roles(config: Config, workers: dict[str, Any]) -> Roles:
    """The driver's roles, made of workers in this process."""
    on_gpu = workers["actor"].device.type == "cuda"
    return Roles(
        actor=workers["actor"],
        rewards=workers["reward"],
        rollouts=InlineRollouts(workers["rollout"]),
        critic=workers.get("critic"),
        reference=workers.get("reference"),
        devices=1.0 if on_gpu else float(usable_cpus()),
        takes_turns=takes_turns(config, on_gpu),
    )


def request_of(config: Config, algorithm: Algorithm, gpu: bool) -> Request:
    """The resources that the run asks for; with `gpu`, every role with a model gets a device."""
    ranks = role_ranks(config, algorithm)
    with_model = [name for name in ranks if name != "reward" or config.reward.model is not None]
    wide = {"rollout": config.rollout.tensor_parallel}
    return Request(ranks, config.placement, with_model if gpu else (), wide)


def placement_here(config: Config, algorithm: Algorithm, on_gpu: bool) -> Placement:
    """The placement of the run on a private Ray of this machine, even if this machine has too few GPUs."""
    node = {"CPU": float(config.cluster.num_cpus or usable_cpus()), "GPU": float(torch.cuda.device_count())}
    return plan_placement(request_of(config, algorithm, on_gpu), [node])


def wants_gpu(config: Config, available: bool) -> bool:
    """Whether models run on GPUs; `available`: whether there are any."""
    return config.trainer.device == "cuda" or (config.trainer.device == "auto" and available)
