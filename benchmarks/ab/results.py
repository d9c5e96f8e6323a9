"""From runs to what they say: budgets, arms, comparisons, verdict. `results.json` is what `collect` returns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ab import measure
from ab.arms import Arm, Definition, Plan, differing
from ab.measure import AXES, Measured
from ab.runs import FINISHED, Run, machine, weights_digest
from ab.shapes import measured_peak, parameters_of, shape_of
from tandem.platform.comparison import (
    Interval,
    interquartile_mean,
    mean,
    paired_difference,
    probability_of_improvement,
    value_at,
)
from tandem.platform.config import ConfigError
from tandem.platform.costs import ModelShape

REWARD = "reward/mean"


def collect(plan: Plan, arms: Sequence[Arm], runs: Sequence[Run]) -> dict[str, Any]:
    """All that a report is built from, as JSON can hold it, and what follows from it."""
    trust = arms[0].config.model.trust_remote_code
    peak = measured_peak(arms[0].config.model.dtype) if plan.peak else None
    first = arms[0].settings
    raw = {
        "plan": {**asdict(plan), "definitions": {arm.name: asdict(plan.definitions[arm.name]) for arm in arms}},
        "machine": {**machine(), "peak_flops": peak},
        "model": {
            "path": arms[0].config.model.path or "the embedded Qwen2",
            "parameters": parameters_of(arms[0].model, trust),
            "digest": weights_digest(arms[0].model),
        },
        "data": first["data.train"] or f"the embedded task, {first['task.digits']}-digit {first['task.name']}",
        "settings": first,
        "arms": [_described(arm, plan.definitions[arm.name], first, trust) for arm in arms],
        "runs": [_raw(run) for run in runs],
    }
    return {**raw, "derived": derive(raw)}


def derive(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Budgets, what each arm cost and learned, how arms compare; from the raw part of the results alone.

    Raises:
        ConfigError: no run has finished, or runs of one seed did not begin alike.
    """
    runs = {(run["arm"], run["seed"]): _measured(run) for run in raw["runs"] if run["status"] == FINISHED}
    if not runs:
        errors = {f"{run['arm']} seed {run['seed']}: {run['error']}" for run in raw["runs"]}
        raise ConfigError("no run has finished; there is nothing to compare. " + "; ".join(sorted(errors)[:3]))
    _check_beginnings(raw["runs"])
    arms = {arm["name"]: arm for arm in raw["arms"]}
    spent = {key: _spending(run, arms[key[0]], raw) for key, run in runs.items()}
    budgets = {axis: min(spending[axis][-1] for spending in spent.values()) for axis in AXES}
    metrics = [next(iter(runs.values())).accuracy, REWARD] if _has_accuracy(runs.values()) else [REWARD]
    at = {
        (metric, axis, key): value_at(measure.learning(run, spent[key][axis], metric), budgets[axis])
        for metric in metrics
        for axis in AXES
        for key, run in runs.items()
    }
    return {
        "budgets": budgets,
        "metrics": metrics,
        "arms": {name: _arm(name, raw, runs, at, spent) for name in arms},
        "runs": [
            {
                "arm": key[0],
                "seed": key[1],
                "spent": {axis: spent[key][axis][-1] for axis in AXES},
                "at_budget": {metric: {axis: at[metric, axis, key] for axis in AXES} for metric in metrics},
            }
            for key in runs
        ],
        "comparisons": [
            _comparison(ours, theirs, metric, axis, at, raw["plan"]["seeds"])
            for ours, theirs in raw["plan"]["comparisons"]
            if ours in arms and theirs in arms
            for metric in metrics
            for axis in AXES
        ],
    }


def _comparison(
    ours: str, theirs: str, metric: str, axis: str, at: Mapping[Any, float], seeds: Sequence[int]
) -> dict[str, Any]:
    """Two arms at the same budget, over the seeds that both have finished."""
    paired = [seed for seed in seeds if all((metric, axis, (arm, seed)) in at for arm in (ours, theirs))]
    own, other = ([at[metric, axis, (arm, seed)] for seed in paired] for arm in (ours, theirs))
    found = {"ours": ours, "theirs": theirs, "metric": metric, "axis": axis, "seeds": paired}
    if len(paired) < 2:
        return {**found, "difference": None, "verdict": "too few seeds"}
    difference = paired_difference(own, other)
    return {
        **found,
        "difference": asdict(difference),
        "interquartile_mean": [interquartile_mean(own), interquartile_mean(other)],
        "probability_of_improvement": probability_of_improvement(own, other),
        "verdict": verdict(difference),
    }


def verdict(difference: Interval) -> str:
    """What an interval allows to say."""
    if not difference.shows_difference:
        return "no difference shown"
    return "more" if difference.value > 0 else "less"


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean over seeds with its bootstrap interval."""
    return asdict(paired_difference(values, [0.0] * len(values)))


def _arm(
    name: str, raw: Mapping[str, Any], runs: Mapping[Any, Measured], at: Mapping[Any, float], spent: Any
) -> dict[str, Any]:
    """What an arm cost and learned, over its finished seeds."""
    own = {key: run for key, run in runs.items() if key[0] == name}
    ended = [run for run in raw["runs"] if run["arm"] == name]
    found: dict[str, Any] = {
        "finished": len(own),
        "runs": len(ended),
        "errors": [f"seed {run['seed']}: {run['error']}" for run in ended if run["status"] != FINISHED],
    }
    if not own:
        return found
    arm = next(arm for arm in raw["arms"] if arm["name"] == name)
    each = [
        measure.costs(
            run, raw["plan"]["skip_steps"], arm["prompts"], _shapes(arm), raw["settings"], raw["machine"]["peak_flops"]
        )
        for run in own.values()
    ]
    metrics = dict.fromkeys(metric for metric, _, _ in at)
    trends = [key for key in measure.TRENDS if all(key in run.steps for run in own.values())]
    return found | {
        "costs": _average(each),
        "critic_share": over_seeds([one["critic_share"] for one in each]),
        "step_s": over_seeds([one["seconds"]["step"] for one in each]),
        "startup_s": mean([run.startup_s for run in own.values()]),
        "memory": _average([measure.memory(run, raw["settings"]["cluster.name"] == "inline") for run in own.values()]),
        "at_budget": {
            metric: {axis: over_seeds([at[metric, axis, key] for key in own]) for axis in AXES} for metric in metrics
        },
        "trends": {key: mean([_mean_of(run, key) for run in own.values()]) for key in trends},
        "trend_curves": {key: _by_step([run.steps[key] for run in own.values()]) for key in trends},
        "curves": {
            metric: {
                axis: _band([measure.learning(run, spent[key][axis], metric) for key, run in own.items()]) for axis in AXES
            }
            for metric in metrics
        },
    }


def _band(curves: Sequence[measure.Curve]) -> list[list[float]]:
    """(spent, mean, lowest, highest) over seeds, where their evaluations are: as many in each."""
    rows = list(zip(*curves, strict=False))
    return [[mean([x for x, _ in row]), mean(ys := [y for _, y in row]), min(ys), max(ys)] for row in rows]


def _by_step(columns: Sequence[Sequence[float | None]]) -> list[tuple[int, float]]:
    """(step, mean over seeds) of the steps that have the number in all of them."""
    rows = enumerate(zip(*columns, strict=False), start=1)
    return [(step, mean([value for value in row if value is not None])) for step, row in rows if None not in row]


def _mean_of(run: Measured, key: str) -> float:
    known = [value for value in run.steps[key] if value is not None]
    return statistics.fmean(known) if known else 0.0


def _average(parts: Sequence[Any]) -> Any:
    """Numbers at the same place in nested dictionaries, averaged."""
    if isinstance(parts[0], Mapping):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: _average([part[key] for part in parts if key in part]) for key in keys}
    return mean(parts)


def _spending(run: Measured, arm: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, list[float]]:
    devices = len(raw["machine"]["gpus"]) or raw["machine"]["cores"]
    return measure.spending(run, arm["prompts"], raw["settings"]["train.minibatches"], devices)


def _check_beginnings(runs: Sequence[Mapping[str, Any]]) -> None:
    """Runs begin with the same weights and data, whatever their arm."""
    for key in ("first_weights", "data"):
        found = {run["identity"][key]: f"{run['arm']} seed {run['seed']}" for run in runs if key in run["identity"]}
        if len(found) > 1:
            raise ConfigError(
                f"runs began with different {key}: " + ", ".join(f"{who} {value}" for value, who in found.items())
            )


def _has_accuracy(runs: Any) -> bool:
    return all(any(key.endswith("/greedy") for key in run.evals) for run in runs)


def _described(arm: Arm, made: Definition, first: Mapping[str, Any], trust: bool) -> dict[str, Any]:
    critic = shape_of(arm.critic_model, trust, values=True) if arm.critic_model else None
    own = {key: value[1] for key, value in differing(first, arm.settings).items()}
    return {
        "name": arm.name,
        "label": arm.label,
        "algo": made.algo,
        "is_plain": not (made.settings or made.critic_model or made.critic_path),  # differs in the group alone
        "group": arm.config.rollout.samples_per_prompt,
        "prompts": arm.config.data.prompts_per_step,
        "actor": asdict(shape_of(arm.model, trust)),
        "critic": asdict(critic) if critic else None,
        "differs": own,
    }


def _raw(run: Run) -> dict[str, Any]:
    steps, evals, memory = measure.columns(run.records)
    about = {key: getattr(run, key) for key in ("arm", "seed", "status", "error", "identity", "startup_s")}
    rounded = {
        key: [value if value is None else float(f"{value:.6g}") for value in column] for key, column in steps.items()
    }
    return {**about, "steps": rounded, "evals": evals, "memory": memory}


def _measured(run: Mapping[str, Any]) -> Measured:
    evals = {key: [(int(step), float(value)) for step, value in points] for key, points in run["evals"].items()}
    return Measured(run["arm"], run["seed"], run["steps"], evals, run["memory"], run["startup_s"] or 0.0)


def _shapes(arm: Mapping[str, Any]) -> tuple[ModelShape, ModelShape | None]:
    return ModelShape(**arm["actor"]), ModelShape(**arm["critic"]) if arm["critic"] else None
