"""`dry_run=true`: prints the plan of a run without starting it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tandem.launch.assembly import inputs
from tandem.launch.assembly.memory_plan import MemoryPlan, settle
from tandem.launch.assembly.roles import placement_here, wants_gpu
from tandem.launch.assembly.versions import versions
from tandem.platform.algorithms.registry import algorithm_of
from tandem.platform.config.schema import Config
from tandem.platform.planning.plan import render
from tandem.platform.rewards.functions import verifier_of
from tandem.platform.system.text import shorten, table
from tandem.workers.models.tiny import describe_tiny


def dry_run(config: Config, note: Callable[[str], None]) -> str:
    """The plan as text: data, batch table, roles, bundles, estimated memory, versions.

    Reads data, reward functions, and the model's files other than weights, so that it raises the errors of a run's start.
    Does not start Ray or load weights.

    Args:
        note: shows a line.

    Raises:
        ConfigError, DataError: the run could not start; the message says why.
    """
    algorithm = algorithm_of(config)
    inputs.check_engine(config)
    with TemporaryDirectory() as folder:
        path = config.model.path
        if path is None:
            describe_tiny(config.model, config.task, Path(folder))
            path = folder
        inputs.check_model(config, path)
        data = inputs.read_inputs(config, path, note)
    _check_rewards(config)
    bundles: tuple[Mapping[str, float], ...] = ()
    if config.cluster.name != "inline":
        bundles = placement_here(config, algorithm, wants_gpu(config, torch.cuda.is_available())).bundles
    settle(config, None)
    memory = MemoryPlan(config)
    plans = memory.roles()
    plan = render(config, algorithm, data.steps, memory.parameters, bundles, versions(), plans, memory.notes())
    return f"data\n{data_table(data)}\n\n{plan}"


def data_table(data: inputs.Inputs) -> str:
    """The training data and the held-out sets, with their first and last prompts."""
    rows = [["set", "prompts", "tokens each", "first", "last"]]
    sets = [("train", [row.ids for row in data.source.rows], [row.text for row in data.source.rows])]
    sets += [(held.name, [p.ids for p in held.prompts], [p.text for p in held.prompts]) for held in data.evaluations]
    for name, ids, texts in sets:
        lengths = sorted(map(len, ids))
        shown = [repr(shorten(text, 40)) for text in (texts[0], texts[-1])]
        rows.append([name, f"{len(ids):,}", f"{lengths[0]} to {lengths[-1]}", *shown])
    return table(rows)


def _check_rewards(config: Config) -> None:
    """Loads the reward functions in separate processes, as a run does.

    Raises:
        ConfigError, RewardError: a function cannot be loaded.
    """
    from tandem.workers.roles.reward import RewardSpec, RewardWorker

    reward = replace(config.reward, model=None)  # its files are checked with the policy's
    if reward.functions or reward.function:
        verifier = verifier_of(config.eval.function, config.reward.functions)
        RewardWorker(RewardSpec(replace(reward, processes=1), verifier=verifier)).close()
