"""The plan of a run: what `dry_run=true` prints. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.platform.algorithms.registry import Algorithm
from tandem.platform.config.schema import Config
from tandem.platform.system.text import human_bytes, table

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class RolePlan:
    """One role: its ranks, and an estimate of the bytes that each rank needs."""

    name: str
    ranks: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    working: int | None = 0  # largest pass: activations, logits, their gradients, cache; None: not counted
    process: int = 0  # interpreter and libraries

    @property
    def held(self) -> int:
        """Weights, gradients and optimizer state together."""
        return self.weights + self.gradients + self.optimizer

    @property
    def bytes_per_rank(self) -> int:
        """The sum of all counted parts."""
        return self.process + self.held + (self.working or 0)


def role_ranks(config: Config, algorithm: Algorithm) -> dict[str, int]:
    """Ranks by role, in the order of the loop. Roles that the run does not need are absent."""
    ranks = {"rollout": config.rollout.replicas, "reward": 1, "actor": config.actor.ranks}
    if config.needs_reference:
        ranks["reference"] = config.actor.ranks
    if algorithm.needs_critic:
        ranks["critic"] = config.critic.ranks
    return ranks


def role_plans(
    config: Config,
    algorithm: Algorithm,
    parameters: int,
    working: Mapping[str, int | None] | None = None,
    process: int = 0,
) -> list[RolePlan]:
    """The roles with their memory, for a model with `parameters` parameters (assumes a critic of the same size).

    Args:
        working: by role, bytes of its largest pass on a rank. process: bytes of a process before it loads a model.
    """
    size = BYTES[config.model.dtype]
    plans = []
    for name, ranks in role_ranks(config, algorithm).items():
        if name in ("actor", "critic"):
            plans.append(_trained(name, ranks, parameters, size, config.trainer.zero_stage))
        else:
            plans.append(RolePlan(name, ranks, 0 if name == "reward" else parameters * size))
    return [replace(plan, working=_most(plan, config, parameters, working or {}), process=process) for plan in plans]


def _most(plan: RolePlan, config: Config, parameters: int, working: Mapping[str, int | None]) -> int | None:
    """Bytes of the role's largest pass, or of its optimizer step if that needs more; None: not counted."""
    passes = working.get(plan.name, 0)
    if plan.name not in working or passes is None or not plan.optimizer:
        return passes
    return max(passes, step_bytes(config, parameters, plan.ranks))


def step_bytes(config: Config, parameters: int, ranks: int) -> int:
    """Temporary bytes of an optimizer step on a rank, as measured with DeepSpeed and torch's AdamW.

    Two copies of the weights. With sharded states or bfloat16: three float32 copies of the rank's shard; with bfloat16 also
    the gradients in bfloat16.
    """
    if config.model.dtype == "float32" and config.trainer.zero_stage == 0:
        return 8 * parameters
    return 12 * math.ceil(parameters / ranks) + (2 * parameters if config.model.dtype == "bfloat16" else 0)


def _trained(name: str, ranks: int, parameters: int, size: int, stage: int) -> RolePlan:
    """AdamW: two float32 moments, and a float32 copy of the weights if these are 16-bit or sharded."""
    shard = math.ceil(parameters / ranks)
    states = 8 + (4 if size < 4 or stage > 0 else 0)
    return RolePlan(
        name,
        ranks,
        weights=(shard if stage >= 3 else parameters) * size,
        gradients=(shard if stage >= 2 else parameters) * size,
        optimizer=(shard if stage >= 1 else parameters) * states,
    )


def _critic_updates(config: Config) -> list[tuple[str, int, str]]:
    """The row of the critic's optimizer steps, if its number of epochs is set."""
    epochs, minibatches = config.critic.epochs_per_batch, config.train.minibatches
    if epochs is None:
        return []
    return [("the critic's per step", epochs * minibatches, f"= {epochs} epochs x {minibatches} mini-batches")]


def batch_table(config: Config, steps: int | None) -> list[tuple[str, str, str]]:
    """(name, number, unit) of every size in a training step."""
    train, minibatch = config.train, config.samples_per_minibatch
    updates = train.epochs_per_batch * train.minibatches
    longest = config.max_sequence_tokens
    per_rank = math.ceil(minibatch / config.actor.ranks)
    microbatches = math.ceil(per_rank / max(1, train.microbatch_tokens // longest))
    rows = [
        ("prompts per step", config.prompts_per_step, "prompts"),
        ("samples per prompt (G)", config.group, "samples"),
        ("samples per step", config.samples_per_step, "samples"),
        ("samples per mini-batch", minibatch, "samples"),
        ("optimizer steps per step", updates, f"= {train.epochs_per_batch} epochs x {train.minibatches} mini-batches"),
        *_critic_updates(config),
        ("longest sequence", longest, "tokens, prompt and response"),
        ("micro-batch", train.microbatch_tokens, "tokens at most, padding included"),
        ("micro-batches per mini-batch", microbatches, "at most, per actor rank"),
    ]
    if steps is not None:
        rows.append(("training steps", steps, "steps"))
        rows.append(("optimizer steps in all", steps * updates, "per trained role"))
    return [(what, f"{number:,}", unit) for what, number, unit in rows]


def _role_row(plan: RolePlan) -> list[str]:
    held = [human_bytes(size) for size in (plan.process, plan.weights, plan.gradients, plan.optimizer)]
    least, working = ("", human_bytes(plan.working)) if plan.working is not None else ("over ", "not counted")
    return [plan.name, str(plan.ranks), *held, working, least + human_bytes(plan.bytes_per_rank)]


def render(
    config: Config,
    algorithm: Algorithm,
    steps: int | None,
    parameters: int,
    bundles: Sequence[Mapping[str, float]],
    versions: Mapping[str, str],
    plans: Sequence[RolePlan],
    notes: Sequence[str] = (),
) -> str:
    """The plan as text. `notes`: remarks on the memory."""
    head = ["role", "ranks", "process", "weights", "gradients", "optimizer", "passes", "per rank"]
    roles = [head] + [_role_row(plan) for plan in plans]
    critic = "with a critic" if algorithm.needs_critic else "no critic"
    kinds = list(dict.fromkeys(kind for bundle in bundles for kind in bundle))
    where = [["bundle", *kinds]] if bundles else [["none: all roles share this process"]]
    where += [[str(number), *(f"{bundle.get(kind, 0):g}" for kind in kinds)] for number, bundle in enumerate(bundles)]
    sections = [
        f"algorithm {algorithm.name}, adv_estimator {config.adv_estimator} ({critic}), {parameters:,} parameters",
        "batch\n" + table(batch_table(config, steps)),
        "\n".join(["roles (estimated, each at the peak of its largest pass)", table(roles), *notes]),
        f"placement {config.placement.name}, {config.placement.strategy}\n" + table(where),
        "versions\n" + table([[name, version] for name, version in versions.items()]),
    ]
    return "\n\n".join(sections)
