"""What one run measured: its spending on every axis, its learning curves, its times and its memory."""

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
"""Budgets, and what each counts."""
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
"""What a step is made of, for its time; with a critic `infer_values` and `update_critic` are its own."""
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
"""What is shown of learning besides the held-out accuracy."""
KEPT = (
    *TRENDS,
    *(f"time/{name}_s" for name in ("step", "gradient_noise", "infer", "update", *PARTS)),
    *("tokens/prompt", "tokens/response", "tokens/greedy", "samples/sampled", "samples/trained", "sampling/rounds"),
    *("policy/epochs", "policy/kl", "policy/gradient_variance", "kl/sampled", "response/truncated_frac"),
)
"""Columns of a run that the results hold, beside evaluations and memory."""
SMOOTH = 3  # steps that a reward is averaged over

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """One finished run as columns: `steps[key][i]` is of training step i + 1, None where it has no such number."""

    arm: str
    seed: int
    steps: Mapping[str, Sequence[float | None]]
    evals: Mapping[str, Sequence[tuple[int, float]]]  # by metric (step, value)
    memory: Mapping[str, Mapping[str, float]]  # by role and kind, bytes
    startup_s: float
    devices: float  # GPUs that it held, or CPUs

    def column(self, key: str, missing: float = 0.0) -> list[float]:
        """The numbers of every training step."""
        return [missing if value is None else value for value in self.steps.get(key, [None] * self.length)]

    @property
    def length(self) -> int:
        """Training steps."""
        return len(self.steps["time/step_s"])

    @property
    def accuracy(self) -> str | None:
        """The metric that arms are compared by: greedy accuracy of the first held-out set; None without one."""
        return next((key for key in self.evals if key.endswith("/greedy")), None)


def columns(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]], dict[str, Any]]:
    """Of the lines of a metrics.jsonl: kept columns of the training steps, evaluations, memory at the end."""
    trained = [record for record in records if "time/step_s" in record]
    steps = {key: [record.get(key) for record in trained] for key in KEPT if any(key in record for record in trained)}
    evals: dict[str, list[Any]] = {}
    for record in records:
        for key, found in held_out(record).items():
            if found.measure in ("greedy", "mean") and record[key] is not None:
                evals.setdefault(key, []).append((record["step"], record[key]))
    memory: dict[str, Any] = {}
    for key, value in (trained[-1] if trained else {}).items():
        if of_role := memory_key(key):
            memory.setdefault(of_role[0], {})[of_role[1]] = value
    return steps, evals, memory


def spending(run: Measured, prompts_per_step: int, minibatches: int) -> dict[str, list[float]]:
    """By axis, what has been spent after 0, 1, 2, ... training steps. Measuring the gradient's noise is not training."""
    seconds = step_seconds(run)
    tokens = [one + other for one, other in zip(run.column("tokens/response"), run.column("tokens/greedy"), strict=True)]
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
    """Seconds of every training step without what measuring the gradient's noise took."""
    return [
        step - noise for step, noise in zip(run.column("time/step_s"), run.column("time/gradient_noise_s"), strict=True)
    ]


def learning(run: Measured, spent: Sequence[float], metric: str) -> Curve:
    """(spent, value) of an evaluation metric, or of the reward as the mean of the last few steps that had one."""
    if metric in run.evals:
        return [(spent[step], value) for step, value in run.evals[metric]]
    known = [(step, value) for step, value in enumerate(run.steps.get(metric, ()), start=1) if value is not None]
    smooth = [
        (spent[step], statistics.fmean(value for _, value in known[max(0, place - SMOOTH) : place]))
        for place, (step, _) in enumerate(known, start=1)
    ]
    return [(0.0, known[0][1]), *smooth] if known else []


def reached(curve: Curve, budget: float) -> float | None:
    """The value where the budget is spent; None where that was not measured: before the first point after the beginning, a
    line from the beginning on would be all there is.
    """
    later = [spent for spent, _ in curve if spent > 0]
    if not later or not later[0] <= budget <= curve[-1][0]:
        return None
    return value_at(curve, budget)


def timed_steps(run: Measured, skip: int) -> list[int]:
    """Training steps, from 0, whose times count: not the first ones, none in which more was measured, and none in which the
    policy stood still because its critic learned alone. Rather some of these than none.
    """
    noise, epochs = run.column("time/gradient_noise_s"), run.column("policy/epochs")
    moving = [step for step, count in enumerate(epochs) if count > 0] or list(range(run.length))
    quiet = [step for step in moving if noise[step] == 0] or moving
    return [step for step in quiet if step >= skip] or quiet


def times(run: Measured, skip: int) -> dict[str, float]:
    """Mean seconds of a step and of its parts, `step` and the names of `PARTS`; what no part covers is `rest`."""
    mean = _mean_over(run, timed_steps(run, skip))
    found = {part: mean(f"time/{part}_s") for part in PARTS if f"time/{part}_s" in run.steps}
    step = mean("time/step_s") - mean("time/gradient_noise_s")
    return {"step": step, **found, "rest": step - sum(found.values())}


def costs(
    run: Measured,
    skip: int,
    prompts_per_step: int,
    shapes: tuple[ModelShape, ModelShape | None],
    settings: Mapping[str, Any],
    peak: float | None,
) -> dict[str, Any]:
    """What a step of the run costs: times, tokens, operations by phase, and their share of the machine's peak."""
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
    """Variance of the batch's gradient over its squared norm, each averaged over the steps that measured them."""
    both = [
        (variance, variance / noise)
        for variance, noise in zip(*(run.column(f"policy/gradient_{name}") for name in ("variance", "noise")), strict=True)
        if noise > 0
    ]
    return sum(one for one, _ in both) / sum(other for _, other in both) if both else None


def _epochs(run: Measured, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Passes of the policy, which may stop early, and of the critic over a batch."""
    planned = float(settings["train.epochs_per_batch"])
    made = [count for count in run.column("policy/epochs") if count > 0]
    return (statistics.fmean(made) if made else 0.0), planned


def memory(run: Measured, one_process: bool) -> dict[str, dict[str, float]]:
    """By role, the bytes of every item, the `peak` of its process or allocator, and `other`, which no item explains.

    Roles in one process have tensors of their own; baseline, peak and what nothing explains are the `process`'s, whose peak
    has the activations of one role at a time.
    """
    items = {role: {item: float(kinds.get(item) or 0.0) for item in ITEMS} for role, kinds in run.memory.items()}
    peaks = {role: float(kinds.get("peak") or 0.0) for role, kinds in run.memory.items()}
    if not one_process:
        return {role: _with_rest(own, peaks[role], sum(own.values())) for role, own in items.items()}
    # A role that was loaded later has found the tensors of the others in the process.
    baseline = min((own["baseline"] for own in items.values() if own["baseline"]), default=0.0)
    roles = {role: _with_rest({**own, "baseline": 0.0}, 0.0, 0.0) for role, own in items.items()}
    # They train one after the other: when one has activations, the others have none.
    held = sum(own[item] for own in items.values() for item in ITEMS if item not in ("activations", "baseline"))
    known = baseline + held + max(own["activations"] for own in items.values())
    process = _with_rest({**dict.fromkeys(ITEMS, 0.0), "baseline": baseline}, max(peaks.values()), known)
    return {**roles, "process": process}


def _with_rest(items: Mapping[str, float], peak: float, known: float) -> dict[str, float]:
    return {**items, "other": peak - known, "peak": peak}


def _mean_over(run: Measured, chosen: Sequence[int]) -> Callable[[str], float]:
    def mean(key: str) -> float:
        column = run.column(key)
        return statistics.fmean(column[step] for step in chosen)

    return mean
