"""Computes results from runs: budgets, arms, comparisons. `describe` gives the raw results, and `derive` all others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from tandem.benchmarks.ab import measure
from tandem.benchmarks.ab.arms import Arm, Definition, Plan, differing
from tandem.benchmarks.ab.comparison import (
    FEWEST,
    Interval,
    false_discovery_rates,
    interquartile_mean,
    mean,
    p_value,
    paired_difference,
    probability_of_improvement,
    seeds_to_tell,
)
from tandem.benchmarks.ab.health import health
from tandem.benchmarks.ab.measure import AXES, Measured
from tandem.benchmarks.ab.runs import FINISHED, machine, weights_digest
from tandem.benchmarks.ab.shapes import measured_peak, parameters_of, shape_of
from tandem.platform.config.schema import ConfigError
from tandem.platform.data.tasks import TASKS
from tandem.platform.planning.costs import ModelShape, Peak, share_problem

REWARD = "reward/mean"
Key = tuple[str, int]
"""(arm, seed) of a run."""


def describe(plan: Plan, arms: Sequence[Arm]) -> dict[str, Any]:
    """The raw results except the runs: plan, machine, model, data, arms, in a form that JSON can hold."""
    config, first = arms[0].config, arms[0].settings
    trust = config.model.trust_remote_code
    peak = None
    if plan.peak and config.cluster.address is None:  # runs on a joined cluster use other machines
        peak = measured_peak(config.model.dtype)
    return {
        "plan": {key: value for key, value in asdict(plan).items() if key not in ("out", "report", "definitions")},
        "machine": machine(),
        "peak_flops": peak.flops if peak else None,
        "peak": asdict(peak) if peak else None,
        "model": {
            "path": config.model.path or "the embedded Qwen2",
            "parameters": parameters_of(arms[0].model, trust),
            "digest": weights_digest(arms[0].model),
        },
        "data": first["data.train"] or _embedded(first),
        "settings": first,
        "arms": [_described(arm, plan.definitions[arm.name], first, trust) for arm in arms],
    }


def _embedded(settings: Mapping[str, Any]) -> str:
    size = f"task.{TASKS[settings['task.name']].sized_by}"
    return f"the embedded task {settings['task.name']}, {size}={settings[size]}"


def derive(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Computes budgets, the costs and learning of each arm, and comparisons from the raw results.

    Raises:
        ConfigError: no run has finished, or runs began with different weights or data.
    """
    finished = _Finished.of(raw)
    budgets = {axis: min(spent[axis][-1] for spent in finished.spent.values()) for axis in AXES}
    pairs = [pair for pair in raw["plan"]["comparisons"] if all(name in finished.arms for name in pair)]
    comparisons = [
        _comparison(finished, ours, theirs, metric, axis)
        for ours, theirs in pairs
        for metric in finished.metrics
        for axis in AXES
    ]
    for family in product(finished.metrics, AXES):  # the pairs, by one metric at one budget
        known = [one for one in comparisons if (one["metric"], one["axis"]) == family and one.get("p_value") is not None]
        for comparison, rate in zip(known, false_discovery_rates([one["p_value"] for one in known]), strict=True):
            comparison["false_discovery_rate"] = rate
    return {
        "budgets": budgets,
        "metrics": finished.metrics,
        "arms": {name: _arm(name, raw, finished, budgets) for name in finished.arms},
        "runs": [_run(key, finished, budgets) for key in finished.runs],
        "comparisons": comparisons,
    }


@dataclass(frozen=True)
class _Finished:
    """The finished runs, and their spending after every step."""

    arms: Mapping[str, Mapping[str, Any]]
    runs: Mapping[Key, Measured]
    spent: Mapping[Key, Mapping[str, Sequence[float]]]
    metrics: Sequence[str]

    @staticmethod
    def of(raw: Mapping[str, Any]) -> _Finished:
        runs = {(run["arm"], run["seed"]): _measured(run, raw) for run in raw["runs"] if run["status"] == FINISHED}
        if not runs:
            errors = {f"{run['arm']} seed {run['seed']}: {run['error']}" for run in raw["runs"]}
            raise ConfigError("no run has finished; there is nothing to compare. " + "; ".join(sorted(errors)[:3]))
        _check_beginnings(raw["runs"])
        arms = {arm["name"]: {**arm, "settings": {**raw["settings"], **arm["differs"]}} for arm in raw["arms"]}
        spent = {
            key: measure.spending(run, arms[key[0]]["prompts"], arms[key[0]]["settings"]["train.minibatches"])
            for key, run in runs.items()
        }
        accuracies = [run.accuracy for run in runs.values()]
        metrics = [REWARD] if None in accuracies else [str(accuracies[0]), REWARD]
        return _Finished(arms, runs, spent, metrics)

    def of_arm(self, name: str) -> dict[Key, Measured]:
        """The runs of an arm."""
        return {key: run for key, run in self.runs.items() if key[0] == name}

    def reached(self, key: Key, metric: str, axis: str, budget: float) -> float | None:
        """The value of a metric when a run had spent a budget."""
        return measure.reached(measure.learning(self.runs[key], self.spent[key][axis], metric), budget)


def _comparison(finished: _Finished, ours: str, theirs: str, metric: str, axis: str) -> dict[str, Any]:
    """Compares two arms over the seeds that both finished, at the largest budget that all these runs reached."""
    seeds = sorted({seed for _, seed in finished.of_arm(ours)} & {seed for _, seed in finished.of_arm(theirs)})
    head: dict[str, Any] = {"ours": ours, "theirs": theirs, "metric": metric, "axis": axis, "seeds": seeds}
    budget = min((finished.spent[arm, seed][axis][-1] for arm in (ours, theirs) for seed in seeds), default=0.0)
    reached = ([finished.reached((arm, seed), metric, axis, budget) for seed in seeds] for arm in (ours, theirs))
    left, right = ([value for value in values if value is not None] for values in reached)
    if not seeds or len(left) < len(seeds) or len(right) < len(seeds):
        why = "no seed in common" if not seeds else "not comparable: spent before the first measurement"
        return {**head, "budget": budget, "difference": None, "verdict": why}
    difference = paired_difference(left, right)
    return {
        **head,
        "budget": budget,
        "difference": asdict(difference),
        "p_value": p_value(left, right),
        "seeds_to_tell": seeds_to_tell(left, right),
        "interquartile_mean": [interquartile_mean(left), interquartile_mean(right)],
        "probability_of_improvement": probability_of_improvement(left, right),
        "verdict": verdict(difference),
    }


def verdict(difference: Interval) -> str:
    """The conclusion that an interval supports."""
    if difference.seeds < FEWEST:
        return f"too few seeds ({difference.seeds})"
    if not difference.shows_difference:
        return "no difference shown"
    return "more" if difference.value > 0 else "less"


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean over seeds with its bootstrap interval."""
    return asdict(paired_difference(values, [0.0] * len(values)))


def _run(key: Key, finished: _Finished, budgets: Mapping[str, float]) -> dict[str, Any]:
    """A run's total spending, and its values at the budgets that all runs reached."""
    reached = {
        metric: {axis: finished.reached(key, metric, axis, budgets[axis]) for axis in AXES} for metric in finished.metrics
    }
    spent = {axis: finished.spent[key][axis][-1] for axis in AXES}
    return {"arm": key[0], "seed": key[1], "spent": spent, "at_budget": reached}


def _arm(name: str, raw: Mapping[str, Any], finished: _Finished, budgets: Mapping[str, float]) -> dict[str, Any]:
    """The costs and learning of an arm over its finished seeds."""
    runs, arm = finished.of_arm(name), finished.arms[name]
    ended = [run for run in raw["runs"] if run["arm"] == name]
    summary: dict[str, Any] = {
        "finished": len(runs),
        "runs": len(ended),
        "errors": [f"seed {run['seed']}: {run['error']}" for run in ended if run["status"] != FINISHED],
    }
    if not runs:
        return summary
    shapes, skip = _shapes(arm), raw["plan"]["skip_steps"]
    each = [measure.costs(run, skip, arm["prompts"], shapes, arm["settings"], raw["peak_flops"]) for run in runs.values()]
    inline = arm["settings"]["cluster.name"] == "inline"
    curves = {
        metric: {
            axis: _band([measure.learning(run, finished.spent[key][axis], metric) for key, run in runs.items()])
            for axis in AXES
        }
        for metric in finished.metrics
    }
    equal = {metric: _over_known(runs, finished, metric, budgets["completions"]) for metric in finished.metrics}
    costs = _average(each)
    return summary | {
        "health": health(list(runs.values()), arm["critic"] is not None, arm["group"]),
        "costs": costs,
        "share_problems": _share_problems(costs["share_of_peak"], raw, ended),
        "critic_share": over_seeds([cost["critic_share"] for cost in each]),
        "startup_s": mean([run.startup_s for run in runs.values()]),
        "memory": _average([measure.memory(run, inline) for run in runs.values()]),
        "at_equal_completions": equal,
        "trends": _trends(list(runs.values())),
        "trend_curves": {
            key: _by_step([run.steps.get(key, ()) for run in runs.values()]) for key in measure.TRENDS if key != REWARD
        },
        "curves": curves,
    }


def _share_problems(
    shares: Mapping[str, float], raw: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The phases with an unreliable share of the peak, and the reasons."""
    peak = Peak(**raw["peak"]) if raw.get("peak") else None
    others = max((run["others"] for run in runs if run.get("others") is not None), default=None)
    problems = {phase: share_problem(share, peak, others) for phase, share in shares.items()}
    return {phase: problem for phase, problem in problems.items() if problem}


def _over_known(own: Mapping[Key, Measured], finished: _Finished, metric: str, budget: float) -> dict[str, float] | None:
    """A metric over seeds at a number of completions; None if a run did not measure it there."""
    values = [finished.reached(key, metric, "completions", budget) for key in own]
    known = [value for value in values if value is not None]
    return over_seeds(known) if len(known) == len(values) else None


def _trends(runs: Sequence[Measured]) -> dict[str, float]:
    """Means over the steps that have a value, then over seeds; for gradient noise, the ratio of means."""
    columns: dict[str, list[float | None]] = {
        key: [_mean_of(run, key) for run in runs] for key in measure.TRENDS if key != "policy/gradient_noise"
    }
    columns["policy/gradient_noise"] = [measure.noise_ratio(run) for run in runs]
    known = {key: [value for value in values if value is not None] for key, values in columns.items()}
    return {key: mean(values) for key, values in known.items() if values}


def _mean_of(run: Measured, key: str) -> float | None:
    known = [value for value in run.steps.get(key, ()) if value is not None]
    return statistics.fmean(known) if known else None


def _by_step(columns: Sequence[Sequence[float | None]]) -> list[tuple[int, float]]:
    """(step, mean over seeds) for the steps that have a value in all runs."""
    rows = enumerate(zip(*columns, strict=False), start=1)
    return [(step, mean([value for value in row if value is not None])) for step, row in rows if None not in row]


def _band(curves: Sequence[measure.Curve]) -> list[list[float]]:
    """(spent, mean, lowest, highest) over seeds at each evaluation, up to the shortest curve."""
    rows = list(zip(*curves, strict=False))
    return [[mean([x for x, _ in row]), mean(ys := [y for _, y in row]), min(ys), max(ys)] for row in rows]


def _average(parts: Sequence[Any]) -> Any:
    """Averages the numbers at each place in nested dictionaries."""
    if isinstance(parts[0], Mapping):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: _average([part[key] for part in parts if key in part]) for key in keys}
    return mean(parts)


def _check_beginnings(runs: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all runs began with the same weights and data."""
    for key in ("first_weights", "data"):
        values = {run["identity"][key]: f"{run['arm']} seed {run['seed']}" for run in runs if key in run["identity"]}
        if len(values) > 1:
            raise ConfigError(
                f"runs began with different {key}: " + ", ".join(f"{who} {value}" for value, who in values.items())
            )


def _described(arm: Arm, made: Definition, first: Mapping[str, Any], trust: bool) -> dict[str, Any]:
    critic = shape_of(arm.critic_model, trust, values=True) if arm.critic_model else None
    differs = {key: value[1] for key, value in differing(first, arm.settings).items()}
    if made.critic_model:  # more useful than its folder in the user's cache
        differs["critic.path"] = "an embedded model with " + ", ".join(f"{k}={v}" for k, v in made.critic_model.items())
    return {
        "name": arm.name,
        "label": arm.label,
        "algo": made.algo,
        "is_plain": not (made.settings or made.critic_model or made.critic_path),  # differs only in group size
        "group": arm.config.group,
        "prompts": arm.config.prompts_per_step,
        "actor": asdict(shape_of(arm.model, trust)),
        "critic": asdict(critic) if critic else None,
        "differs": differs,
    }


def _measured(run: Mapping[str, Any], raw: Mapping[str, Any]) -> Measured:
    evals = {key: [(int(step), float(value)) for step, value in points] for key, points in run["evals"].items()}
    devices = run["devices"] or raw["machine"]["cores"]
    return Measured(run["arm"], run["seed"], run["steps"], evals, run["memory"], run["startup_s"] or 0.0, devices)


def _shapes(arm: Mapping[str, Any]) -> tuple[ModelShape, ModelShape | None]:
    return ModelShape(**arm["actor"]), ModelShape(**arm["critic"]) if arm["critic"] else None
