"""The measurements of one run: spending on every axis, learning curves, times and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tandem.benchmarks.ab.comparison import value_at
from tandem.platform.experience.metrics import held_out, memory_key
from tandem.platform.planning.costs import ModelShape, StepSize, share_of_peak, step_flops

AXES = {
    "completions": "completions sampled",
    "tokens": "tokens generated",
    "prompts": "prompts used",
    "updates": "optimizer steps of the policy",
    "seconds": "wall time of training steps, s",
    "device_seconds": "device-seconds (cores or GPUs)",
}
"""The axes of budgets, with the unit of each."""
PARTS = (
    "generate",
    "score",
    "infer_old",
    "infer_reference",
    "infer_values",
    "credit",
    "update_critic",
    "update_actor",
    "publish",
)
"""The timed parts of a step; `infer_values` and `update_critic` are the critic's."""
OF_THE_CRITIC = ("infer_values", "update_critic")
ITEMS = ("weights", "gradients", "optimizer", "activations", "cache", "baseline")
TRENDS = (
    "reward/mean",
    "critic/explained_variance",
    "group/zero_std_frac",
    "policy/gradient_noise",
    "policy/entropy",
    "policy/approx_kl",
    "response/length_mean",
)
"""The metrics of learning shown besides the held-out accuracy."""
KEPT = (
    *TRENDS,
    *(f"critic/explained_variance_{place}" for place in ("first", "middle", "last")),
    *(f"time/{name}_s" for name in ("step", "gradient_noise", "infer", "update", *PARTS)),
    *("tokens/prompt", "tokens/response", "tokens/greedy", "samples/sampled", "samples/trained", "sampling/rounds"),
    *("policy/epochs", "policy/kl", "policy/gradient_variance", "kl/sampled", "response/truncated_frac"),
)
"""Columns of a run that the results hold, besides evaluations and memory."""
SMOOTH = 3  # number of steps that rewards are averaged over

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """One finished run as columns: `steps[key][i]` is the value of training step i + 1, or None if it has none."""

    arm: str
    seed: int
    steps: Mapping[str, Sequence[float | None]]
    evals: Mapping[str, Sequence[tuple[int, float]]]  # by metric (step, value)
    memory: Mapping[str, Mapping[str, float]]  # by role and kind, bytes
    startup_s: float
    devices: float  # GPUs held, or else CPUs

    def column(self, key: str, missing: float = 0.0) -> list[float]:
        """The values of every training step."""
        return [missing if value is None else value for value in self.steps.get(key, [None] * self.length)]

    @property
    def length(self) -> int:
        """The number of training steps."""
        return len(self.steps["time/step_s"])

    @property
    def accuracy(self) -> str | None:
        """The metric that arms are compared by: greedy accuracy of the first held-out set; None without one."""
        return next((key for key in self.evals if key.endswith("/greedy")), None)


def columns(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]], dict[str, Any]]:
    """From the lines of a metrics.jsonl: the columns in KEPT, the evaluations, and the memory at the end."""
    trained = [record for record in records if "time/step_s" in record]
    steps = {key: [record.get(key) for record in trained] for key in KEPT if any(key in record for record in trained)}
    evals: dict[str, list[Any]] = {}
    for record in records:
        for key, metric in held_out(record).items():
            if metric.measure in ("greedy", "mean") and record[key] is not None:
                evals.setdefault(key, []).append((record["step"], record[key]))
    memory: dict[str, Any] = {}
    for key, value in (trained[-1] if trained else {}).items():
        if of_role := memory_key(key):
            memory.setdefault(of_role[0], {})[of_role[1]] = value
    return steps, evals, memory


def spending(run: Measured, prompts_per_step: int, minibatches: int) -> dict[str, list[float]]:
    """By axis, the spending after 0, 1, 2, ... training steps, without the time that measures gradient noise."""
    seconds = step_seconds(run)
    pairs = zip(run.column("tokens/response"), run.column("tokens/greedy"), strict=True)
    tokens = [sampled + greedy for sampled, greedy in pairs]
    each = {
        "completions": run.column("samples/sampled"),
        "tokens": tokens,
        "prompts": [rounds * prompts_per_step for rounds in run.column("sampling/rounds", 1.0)],
        "updates": [epochs * minibatches for epochs in run.column("policy/epochs")],
        "seconds": seconds,
        "device_seconds": [value * run.devices for value in seconds],
    }
    assert list(each) == list(AXES)
    return {axis: [0.0, *accumulate(values)] for axis, values in each.items()}


def step_seconds(run: Measured) -> list[float]:
    """Seconds of every training step, without the time that measures gradient noise."""
    return [
        step - noise for step, noise in zip(run.column("time/step_s"), run.column("time/gradient_noise_s"), strict=True)
    ]


def learning(run: Measured, spent: Sequence[float], metric: str) -> Curve:
    """(spent, value) of an evaluation metric, or of the reward averaged over the last SMOOTH steps that have one."""
    if metric in run.evals:
        return [(spent[step], value) for step, value in run.evals[metric]]
    known = [(step, value) for step, value in enumerate(run.steps.get(metric, ()), start=1) if value is not None]
    smooth = [
        (spent[step], statistics.fmean(value for _, value in known[max(0, place - SMOOTH) : place]))
        for place, (step, _) in enumerate(known, start=1)
    ]
    return [(0.0, known[0][1]), *smooth] if known else []


def reached(curve: Curve, budget: float) -> float | None:
    """The value when the budget is spent; None if not measured. Between the start and the first point after it nothing was
    measured, so there is no value.
    """
    later = [spent for spent, _ in curve if spent > 0]
    if not later or not later[0] <= budget <= curve[-1][0]:
        return None
    return value_at(curve, budget)


def timed_steps(run: Measured, skip: int) -> list[int]:
    """The training steps, from 0, whose times count: without the first `skip`, steps that measured gradient noise, and
    critic warmup steps. Keeps steps of a kind if otherwise none would be left.
    """
    noise, epochs = run.column("time/gradient_noise_s"), run.column("policy/epochs")
    moving = [step for step, count in enumerate(epochs) if count > 0] or list(range(run.length))
    quiet = [step for step in moving if noise[step] == 0] or moving
    return [step for step in quiet if step >= skip] or quiet


def times(run: Measured, skip: int) -> dict[str, float]:
    """Mean seconds of a whole `step`, of each of `PARTS`, and of the `rest` that no part covers."""
    mean = _mean_over(run, timed_steps(run, skip))
    parts = {part: mean(f"time/{part}_s") for part in PARTS if f"time/{part}_s" in run.steps}
    step = mean("time/step_s") - mean("time/gradient_noise_s")
    return {"step": step, **parts, "rest": step - sum(parts.values())}


def costs(
    run: Measured,
    skip: int,
    prompts_per_step: int,
    shapes: tuple[ModelShape, ModelShape | None],
    settings: Mapping[str, Any],
    peak: float | None,
) -> dict[str, Any]:
    """The costs of a step of the run: times, tokens, operations by phase, and their share of the machine's peak."""
    mean, seconds = _mean_over(run, timed_steps(run, skip)), times(run, skip)
    samples, rounds = mean("samples/sampled"), mean("sampling/rounds") or 1.0
    size = StepSize(
        prompts=prompts_per_step * rounds,
        sampled=samples,
        trained=samples / rounds,  # dynamic sampling fills one batch from several rounds
        prompt_tokens=mean("tokens/prompt") / samples,
        response_tokens=mean("tokens/response") / samples,
    )
    reference = any("infer_reference" in key for key in run.steps)
    flops = step_flops(
        size, shapes[0], shapes[1], reference, _epochs(run, settings), settings["model.gradient_checkpointing"]
    )
    return {
        "seconds": seconds,
        "critic_share": sum(seconds.get(part, 0.0) for part in OF_THE_CRITIC) / seconds["step"],
        "response_tokens": mean("tokens/response"),
        "response_tokens_per_prompt": mean("tokens/response") / size.prompts,
        "response_tokens_per_s": mean("tokens/response") / seconds["step"],
        "tokens_per_s": (mean("tokens/prompt") + mean("tokens/response")) / seconds["step"],
        "flops": flops,
        "share_of_peak": share_of_peak(flops, seconds, peak) if peak else {},
    }


def noise_ratio(run: Measured) -> float | None:
    """Variance of the batch gradient over its squared norm, each averaged over the steps that measured both."""
    both = [
        (variance, variance / noise)
        for variance, noise in zip(*(run.column(f"policy/gradient_{name}") for name in ("variance", "noise")), strict=True)
        if noise > 0
    ]
    return sum(variance for variance, _ in both) / sum(square for _, square in both) if both else None


def _epochs(run: Measured, settings: Mapping[str, Any]) -> tuple[float, float]:
    """The number of passes over a batch: of the policy, which may stop early, and of the critic."""
    planned = float(settings["train.epochs_per_batch"])
    made = [count for count in run.column("policy/epochs") if count > 0]
    return (statistics.fmean(made) if made else 0.0), float(settings.get("critic.epochs_per_batch") or planned)


def memory(run: Measured, one_process: bool) -> dict[str, dict[str, float]]:
    """By role, the bytes of every item, the `peak` of its process or allocator, and `other`, the rest of the peak.

    If all roles are in one process, only tensors count per role. Baseline, peak and `other` belong to the `process`, whose
    peak includes the activations of one role at a time.
    """
    items = {role: {item: float(kinds.get(item) or 0.0) for item in ITEMS} for role, kinds in run.memory.items()}
    peaks = {role: float(kinds.get("peak") or 0.0) for role, kinds in run.memory.items()}
    if not one_process:
        return {role: _with_rest(kinds, peaks[role], sum(kinds.values())) for role, kinds in items.items()}
    # The baseline of a role that was loaded later includes the tensors of the roles before it.
    baseline = min((kinds["baseline"] for kinds in items.values() if kinds["baseline"]), default=0.0)
    roles = {role: _with_rest({**kinds, "baseline": 0.0}, 0.0, 0.0) for role, kinds in items.items()}
    # Roles train one after the other: only one has activations at a time.
    held = sum(kinds[item] for kinds in items.values() for item in ITEMS if item not in ("activations", "baseline"))
    known = baseline + held + max(kinds["activations"] for kinds in items.values())
    process = _with_rest({**dict.fromkeys(ITEMS, 0.0), "baseline": baseline}, max(peaks.values()), known)
    return {**roles, "process": process}


def _with_rest(items: Mapping[str, float], peak: float, known: float) -> dict[str, float]:
    return {**items, "other": peak - known, "peak": peak}


def _mean_over(run: Measured, chosen: Sequence[int]) -> Callable[[str], float]:
    def mean(key: str) -> float:
        column = run.column(key)
        return statistics.fmean(column[step] for step in chosen)

    return mean
