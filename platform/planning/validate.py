"""Checks the configuration before anything is allocated.

Every message gives the problem, the conflicting values with their units, and what to set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping

from tandem.platform.algorithms.registry import ESTIMATORS, POLICY_LOSSES, Algorithm, Estimator, Objective, algorithm_of
from tandem.platform.config.schema import Config, ConfigError, each_setting
from tandem.platform.config.setting import BOUNDS
from tandem.platform.loop.metrics import TOTALS
from tandem.platform.loop.schedules import schedule_problems
from tandem.platform.planning.choices import choices_of
from tandem.platform.planning.validate_algo import algo_problems, algo_warnings
from tandem.platform.rewards.functions import REWARDS
from tandem.platform.system.text import did_you_mean

SINKS = ("tensorboard", "wandb", "mlflow")
LONGEST_NAME = 200  # bytes of run.name; file systems allow 255, and temporary files have longer names
OF_VLLM = tuple(f"rollout.{name}" for name in ("gpu_memory_share", "kv_cache_gb", "max_model_tokens", "prefix_caching"))
OF_RAY = ("trainer.weight_transport", "cluster.max_restarts", "cluster.num_cpus", "cluster.call_timeout_s")


def validate(config: Config, given: Collection[str] = ()) -> list[str]:
    """Refuses a configuration that cannot work; returns warnings about settings that are probably not intended.

    Args:
        given: dotted keys that the user has set.

    Raises:
        ConfigError: lists every problem, one per line.
    """
    if problems := list(_values(config)):
        raise ConfigError("\n".join(problems))
    algorithm = algorithm_of(config)
    if problems := [problem for check in _RELATIONS for problem in check(config, algorithm, given)]:
        raise ConfigError("\n".join(problems))
    return list(_warnings(config, given))


def _values(config: Config) -> Iterator[str]:
    for key, value, meta in each_setting(config):
        if value is None:
            continue
        choices = choices_of(key, meta)
        is_path = meta.get("or_path") and ":" in str(value)
        if choices and value not in choices and not is_path:
            or_path = ", nor path.py:name" if meta.get("or_path") else ""
            yield f"{key}={value}: not one of {', '.join(choices)}{or_path}{did_you_mean(str(value), choices)}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, int) and abs(value) >= 2**63:
            yield f"{key} has {value.bit_length()} bits; at most 63 are allowed"
            continue
        for name, holds, words in BOUNDS:
            if meta.get(name) is not None and not holds(value, meta[name]):
                yield f"{key}={value:g}: must be {words} {meta[name]:g}"


def _estimator(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    group, least = config.group, algorithm.estimator.min_group
    if group < least:
        yield (
            f"adv_estimator={config.adv_estimator} compares the samples of a prompt and needs at least "
            f"{least} samples, but rollout.samples_per_prompt={group}. "
            f"Set rollout.samples_per_prompt={least} or more, or adv_estimator=gae"
        )
    without_critic = set() if algorithm.needs_critic else {"critic"}
    yield from _unread(f"adv_estimator={config.adv_estimator}", ESTIMATORS, algorithm.estimator, given, without_critic)
    policy_loss = f"algo.policy_loss={config.algo.policy_loss}"
    yield from _unread(policy_loss, POLICY_LOSSES, algorithm.objective, given, set())


def _unread(
    chosen: str,
    parts: Mapping[str, Estimator | Objective],
    active: Estimator | Objective,
    given: Collection[str],
    more: Collection[str],
) -> Iterator[str]:
    """Yields user settings that the chosen part does not read although other parts do, or that are in or below `more`."""
    unread = {key for part in parts.values() for key in part.reads if key not in active.reads} | set(more)
    for key in sorted(given):
        if any(key == name or key.startswith(name + ".") for name in unread):
            yield f"{key} is set, but {chosen} does not read it. Remove it, or change {chosen.partition('=')[0]}"


def _batch_sizes(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    samples, parts = config.samples_per_step, config.train.minibatches
    sizes = (
        f"data.prompts_per_step={config.prompts_per_step} prompts x "
        f"rollout.samples_per_prompt={config.group} = {samples} samples"
    )
    if samples % parts:
        valid = [n for n in range(1, samples + 1) if samples % n == 0]
        nearest = [max(n for n in valid if n < parts), *(n for n in valid if n > parts)][:2]
        yield (
            f"{sizes} cannot be cut into train.minibatches={parts} equal mini-batches. "
            f"Nearest valid train.minibatches: {' or '.join(map(str, nearest))}"
        )
        return
    ranks = {"actor": config.actor.ranks} | ({"critic": config.critic.ranks} if algorithm.needs_critic else {})
    for role, count in ranks.items():
        if config.samples_per_minibatch < count:
            yield (
                f"a mini-batch has {config.samples_per_minibatch} samples ({sizes}, in train.minibatches={parts}), fewer "
                f"than {role}.ranks={count}. Set {role}.ranks={config.samples_per_minibatch} or fewer, or larger batches"
            )
    if config.prompts_per_step < config.rollout.replicas:
        yield (
            f"rollout.replicas={config.rollout.replicas} engines share data.prompts_per_step="
            f"{config.prompts_per_step} prompts; set rollout.replicas={config.prompts_per_step} or fewer"
        )
    budget = config.train.max_tokens_per_microbatch
    if budget is not None and budget < config.max_sequence_tokens:
        yield (
            f"train.max_tokens_per_microbatch={budget} tokens is less than one sequence: "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens} = {config.max_sequence_tokens} tokens. "
            f"Set train.max_tokens_per_microbatch={config.max_sequence_tokens} or more"
        )


def _gradient_noise(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    every = f"train.gradient_noise_every={config.train.gradient_noise_every}"
    if config.train.gradient_noise_every and config.trainer.zero_stage == 3:
        yield f"{every} needs whole weights on each rank, which trainer.zero_stage=3 shards. Set one of them lower, or to 0"
    if config.train.gradient_noise_every and config.prompts_per_step < 2:
        yield f"{every} compares two halves of the prompts, but data.prompts_per_step={config.prompts_per_step}"


def _checkpoints(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    kept = config.checkpoint.keep_best
    if kept and not (config.eval.every and config.checkpoint.every and config.checkpoint.every % config.eval.every == 0):
        yield (
            f"checkpoint.keep_best={kept} keeps the checkpoints with the best evaluation, but with checkpoint.every="
            f"{config.checkpoint.every} and eval.every={config.eval.every} steps some have no evaluation. Set "
            "checkpoint.every to a multiple of eval.every"
        )


def _tracking(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    for name in config.tracking.sinks:
        if name not in SINKS:
            yield f"tracking.sinks: {name} is not one of {', '.join(SINKS)}{did_you_mean(name, SINKS)}"
    if len(set(config.tracking.sinks)) < len(config.tracking.sinks):
        yield f"tracking.sinks={config.tracking.sinks}: name each tracker only once"


def _name(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    name = config.run.name
    if name is not None and (not re.fullmatch(r"[\w.+=@-]+", name) or not name.strip(".")):
        yield f"run.name={name[:LONGEST_NAME]!r} must be a valid folder name: letters, digits and . _ - + = @ only"
    elif name is not None and len(name.encode()) > LONGEST_NAME:
        yield f"run.name={name[:LONGEST_NAME]}... has {len(name.encode())} bytes. Use at most {LONGEST_NAME}"


def _length(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    if (config.run.steps is None) == (config.run.epochs is None):
        both = f"run.steps={config.run.steps} steps and run.epochs={config.run.epochs} epochs"
        yield f"{both}: set exactly one of them"


def _model(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    if config.model.name == "tiny" and config.model.path is not None:
        yield f"model=tiny is the embedded model, but model.path={config.model.path} is set. Remove one of them"
    if config.model.name == "pretrained" and config.model.path is None:
        yield "model=pretrained needs model.path=<folder or hub name>"


def _engine(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    rollout, parallel = config.rollout, f"rollout.tensor_parallel={config.rollout.tensor_parallel}"
    if "" in rollout.stop:
        yield f"rollout.stop={rollout.stop}: an empty text would end every response at once. Remove it"
    if rollout.max_model_tokens is not None and rollout.max_model_tokens < config.max_sequence_tokens:
        yield (
            f"rollout.max_model_tokens={rollout.max_model_tokens} tokens is less than one sequence: "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{rollout.max_response_tokens} = {config.max_sequence_tokens} tokens. Set it to that or more, or leave it out"
        )
    if rollout.tensor_parallel == 1:
        return
    if rollout.engine == "hf":
        yield (
            f"{parallel}: only rollout.engine=vllm runs on several GPUs. Set rollout.engine=vllm, or "
            "rollout.tensor_parallel=1"
        )
    if config.cluster.name != "inline" and config.placement.name == "colocated":
        yield f"{parallel} GPUs belong to one engine, but placement=colocated shares each GPU. Set placement=split"


def _rewards(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    reward = config.reward
    for name in reward.functions:
        if name not in REWARDS:
            known = f"available: {', '.join(REWARDS)}{did_you_mean(name, REWARDS)}"
            yield f"reward.functions.{name}: no such reward function; {known}"
    verifier = config.eval.function
    if verifier is not None and ":" not in verifier and verifier not in REWARDS:
        known = f"available: {', '.join(REWARDS)}, or path.py:name{did_you_mean(verifier, REWARDS)}"
        yield f"eval.function={verifier}: no such function; {known}"
    part = reward.function.rpartition(":")[2] if reward.function is not None else ""
    if part in TOTALS or part.startswith("unscorable"):
        yield f"reward.function={reward.function}: the metric reward/{part} is reserved; rename the function"
    if not any(reward.functions.values()) and reward.function is None and reward.model is None:
        yield "no reward: set reward.functions.<name>=<weight>, reward.function=path.py:name or reward.model=<folder>"


def _cluster(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    if config.cluster.name != "inline":
        return
    if config.cluster.address is not None:
        address = f"cluster.address={config.cluster.address}"
        yield f"cluster=inline runs in this process and cannot join {address}. Set only one of them"
    counts = {"actor.ranks": config.actor.ranks, "rollout.replicas": config.rollout.replicas}
    if algorithm.needs_critic:
        counts["critic.ranks"] = config.critic.ranks
    for key, count in counts.items():
        if count > 1:
            yield f"cluster=inline has one rank per role, but {key}={count}. Set {key}=1 or cluster=local"


def _schedules(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    of_schedules = {"lr_total_steps": "linear", "lr_min_ratio": "linear", "lr_decay_fraction": "wsd"}
    for role in ("actor", "critic"):
        schedule = getattr(config, role).lr_schedule
        for name, needed in of_schedules.items():
            if f"{role}.{name}" in given and (schedule == "constant" or (needed == "wsd" and schedule != "wsd")):
                yield f"{role}.{name} is not read by {role}.lr_schedule={schedule}. Set {role}.lr_schedule={needed}"
    if config.run.steps is not None:
        yield from schedule_problems(config, config.run.steps, algorithm.needs_critic)


def _warnings(config: Config, given: Collection[str]) -> Iterator[str]:
    yield from algo_warnings(config, given)
    if config.critic.warmup_until is None and config.critic.warmup_steps >= (config.run.steps or math.inf):
        steps = f"critic.warmup_steps={config.critic.warmup_steps} steps of run.steps={config.run.steps}"
        yield f"{steps}: the policy never learns. Set critic.warmup_steps lower, or run.steps higher"
    of_tiny = [key for key in given if key.startswith(("model.tiny.", "model.warmstart."))]
    if config.model.name != "tiny" and of_tiny:
        yield f"{', '.join(sorted(of_tiny))}: not read, since model.path={config.model.path} is set"
    unread = [key for key in given if key in OF_VLLM]
    if config.rollout.engine == "hf" and unread:
        yield f"{', '.join(sorted(unread))}: not read, since rollout.engine=hf"
    if config.rollout.engine == "auto" and unread:
        yield f"{', '.join(sorted(unread))}: read only by vLLM, which rollout.engine=auto uses only on a GPU"
    of_ray = [key for key in given if key.startswith("placement.") or key in OF_RAY]
    if config.cluster.name == "inline" and of_ray:
        yield f"{', '.join(sorted(of_ray))}: not read, since cluster=inline has no Ray"
    if config.cluster.address is not None and "cluster.num_cpus" in given:
        yield f"cluster.num_cpus: not read, since the run joins the cluster at cluster.address={config.cluster.address}"
    tasks = [key for key in given if key.startswith("task.")]
    if config.data.train is not None and tasks:
        yield f"{', '.join(sorted(tasks))}: not read, since data.train={config.data.train} is set"


_RELATIONS = (
    _estimator,
    _batch_sizes,
    _length,
    _name,
    _gradient_noise,
    _checkpoints,
    _tracking,
    algo_problems,
    _model,
    _engine,
    _rewards,
    _schedules,
    _cluster,
)
