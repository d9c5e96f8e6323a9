"""`dry_run=true`: the plan of a run, without starting anything."""

from __future__ import annotations

from typing import Any

import torch

from tandem.launch import prepare
from tandem.launch.roles import request_of, wants_gpu
from tandem.launch.versions import versions
from tandem.platform.algorithms import resolve
from tandem.platform.config import Config
from tandem.platform.plan import render
from tandem.workers.cluster import usable_cpus
from tandem.workers.models import skeleton
from tandem.workers.placement import plan_placement


def dry_run(config: Config) -> str:
    """The plan as text: batch table, roles, bundles, estimated memory, versions."""
    algorithm = resolve(config.algo.name, config.adv_estimator, config.algo.policy_loss)
    bundles: list[Any] = []
    if config.cluster.name != "inline":
        gpu = wants_gpu(config, torch.cuda.is_available())
        node = {"CPU": float(config.cluster.num_cpus or usable_cpus()), "GPU": float(torch.cuda.device_count())}
        bundles = list(plan_placement(request_of(config, algorithm, gpu), [node]).bundles)
    steps = config.run.steps  # run.epochs needs the data, which a plan does not read
    return render(config, algorithm, steps, count_parameters(config), bundles, versions())


def count_parameters(config: Config) -> int:
    """Parameters of the model, from its config alone: no weight is loaded."""
    with torch.device("meta"):
        model = _skeleton(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _skeleton(config: Config) -> Any:
    if config.model.path is None:
        from tandem.platform.tasks import load_task
        from tandem.workers.tiny import character_tokenizer, tiny_model

        return tiny_model(config.model.tiny, character_tokenizer(load_task(config.task).characters))
    prepare.check_context(config, config.model.path)
    return skeleton(config.model.path, config.model)
