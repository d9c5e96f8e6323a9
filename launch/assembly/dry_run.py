"""`dry_run=true`: the plan of a run, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tandem.launch.assembly import prepare
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

    Data, the model's files besides its weights, and reward functions are read, so that what a run would refuse at its
    start is refused here; Ray is not started, and no weight is loaded.

    Args:
        note: shows a line.

    Raises:
        ConfigError, DataError: the run could not start, and why.
    """
    algorithm = algorithm_of(config)
    prepare.check_engine(config)
    with TemporaryDirectory() as folder:
        path = config.model.path
        if path is None:
            describe_tiny(config.model, config.task, Path(folder))
            path = folder
        prepare.check_model(config, path)
        data = prepare.inputs(config, path, note)
    _check_rewards(config)
    bundles: tuple[Mapping[str, float], ...] = ()
    if config.cluster.name != "inline":
        bundles = placement_here(config, algorithm, wants_gpu(config, torch.cuda.is_available())).bundles
    settle(config, None)
    memory = MemoryPlan(config)
    plans = memory.roles()
    plan = render(config, algorithm, data.steps, memory.parameters, bundles, versions(), plans, memory.notes())
    return f"data\n{data_table(data)}\n\n{plan}"


def data_table(data: prepare.Inputs) -> str:
    """The training data and the held-out sets, with their first and last prompts."""
    rows = [["set", "prompts", "tokens each", "first", "last"]]
    sets = [("train", [row.ids for row in data.source.rows], [row.text for row in data.source.rows])]
    sets += [(found.name, [p.ids for p in found.prompts], [p.text for p in found.prompts]) for found in data.evaluations]
    for name, ids, texts in sets:
        lengths = sorted(map(len, ids))
        shown = [repr(shorten(text, 40)) for text in (texts[0], texts[-1])]
        rows.append([name, f"{len(ids):,}", f"{lengths[0]} to {lengths[-1]}", *shown])
    return table(rows)


def _check_rewards(config: Config) -> None:
    """Loads the reward functions as a run does, in processes of their own.

    Raises:
        ConfigError, RewardError: one cannot be loaded.
    """
    from tandem.workers.roles.reward import RewardSpec, RewardWorker

    reward = replace(config.reward, model=None)  # whose files are checked with the policy's
    if reward.functions or reward.function:
        verifier = verifier_of(config.eval.function, config.reward.functions)
        RewardWorker(RewardSpec(replace(reward, processes=1), verifier=verifier)).close()
