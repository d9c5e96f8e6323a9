"""`dry_run=true`: the plan of a run, without starting anything."""

from __future__ import annotations

from typing import Any

import torch

from tandem.launch import prepare
from tandem.launch.memory_plan import MemoryPlan, settle
from tandem.launch.roles import placement_of, wants_gpu
from tandem.launch.versions import versions
from tandem.platform.algorithms import resolve
from tandem.platform.config import Config
from tandem.platform.plan import render
from tandem.workers.cluster import usable_cpus


def dry_run(config: Config) -> str:
    """The plan as text: batch table, roles, bundles, estimated memory, versions.

    Raises:
        ConfigError: the model is too short for the sequences, or not even one fits into the memory.
    """
    if config.model.path is not None:
        prepare.check_context(config, config.model.path)
    algorithm = resolve(config.algo.name, config.adv_estimator, config.algo.policy_loss)
    bundles: list[Any] = []
    if config.cluster.name != "inline":
        gpu = wants_gpu(config, torch.cuda.is_available())
        cpus = float(config.cluster.num_cpus or usable_cpus())
        bundles = list(placement_of(config, algorithm, cpus, gpu).bundles)
    settle(config, None)
    memory = MemoryPlan(config)
    plans = memory.roles()
    steps = config.run.steps  # run.epochs needs the data, which a plan does not read
    return render(config, algorithm, steps, memory.parameters, bundles, versions(), plans, memory.notes())
