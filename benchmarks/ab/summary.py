"""The first page of the report: a verdict per pair and budget, what the critic costs, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.benchmarks.ab.measure import AXES
from tandem.benchmarks.ab.verdict import critic_bytes, difference_text, finished, label
from tandem.platform.system.text import human_bytes

WON, UNCLEAR, FAULT = "won", "unclear", "fault"


@dataclass(frozen=True)
class Cell:
    """A verdict in words, the difference with its interval, and its look: `won`, `unclear` or `fault`."""

    word: str
    detail: str
    look: str


@dataclass(frozen=True)
class Row:
    """The verdicts on a pair of arms, by budget in the order of AXES."""

    pair: str
    cells: tuple[Cell, ...]


def verdict_rows(results: Mapping[str, Any]) -> list[Row]:
    """A row per compared pair, for the metric that arms are compared by."""
    derived = results["derived"]
    pairs = dict.fromkeys((comparison["ours"], comparison["theirs"]) for comparison in derived["comparisons"])
    found = {
        (comparison["ours"], comparison["theirs"], comparison["axis"]): comparison
        for comparison in derived["comparisons"]
        if comparison["metric"] == derived["metrics"][0]
    }
    return [
        Row(
            f"{label(results, ours)} against {label(results, theirs)}",
            tuple(_cell(results, found[ours, theirs, axis]) for axis in AXES),
        )
        for ours, theirs in pairs
    ]


def _cell(results: Mapping[str, Any], comparison: Mapping[str, Any]) -> Cell:
    ours, theirs, verdict = comparison["ours"], comparison["theirs"], comparison["verdict"]
    detail = difference_text(comparison)
    for name in (ours, theirs):
        if problem := results["derived"]["arms"][name]["health"]["problem"]:
            return Cell(problem, detail, FAULT)
    if verdict in ("more", "less"):
        return Cell(f"{label(results, ours if verdict == 'more' else theirs)} better", detail, WON)
    return Cell(verdict.partition(":")[0], detail, UNCLEAR)


def costs(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(value, what it is) of the critic's costs in the first arm that has one."""
    for name, arm in finished(results).items():
        if "critic" in arm["memory"]:
            of = f"critic of {label(results, name)}"
            learnt = arm["health"]["explained"]["all tokens"]
            return [
                (f"{arm['critic_share']['value']:.0%}", f"of a step, {of}"),
                (human_bytes(critic_bytes(arm)), f"of tensors, {of}"),
                ("-" if learnt is None else f"{learnt:.2f}", f"of the variance of the returns explained, {of}"),
            ]
    return []


def recommendation(results: Mapping[str, Any]) -> str:
    """What a team should do, for the first pair of which one arm has a critic and the other has none."""
    derived, arms = results["derived"], {arm["name"]: arm for arm in results["arms"]}
    pairs = [(c["ours"], c["theirs"]) for c in derived["comparisons"]]
    pair = next((pair for pair in pairs if bool(arms[pair[0]]["critic"]) != bool(arms[pair[1]]["critic"])), None)
    if pair is None:
        return "No compared pair has a critic on one side only, so this says nothing about critics."
    critic, plain = pair if arms[pair[0]]["critic"] else pair[::-1]
    names = label(results, critic), label(results, plain)
    for name in (critic, plain):
        if problem := derived["arms"][name]["health"]["problem"]:
            return (
                f"Do not decide between {names[0]} and {names[1]} by this: {problem} in {label(results, name)}. "
                + (
                    "Try critic.warmup_steps, critic.epochs_per_batch, a higher critic.lr, or a longer run"
                    if name == critic
                    else "Try easier prompts, larger groups or algo.dynamic_sampling"
                )
                + ", then compare again."
            )
    verdicts = {
        c["axis"]: c["verdict"] if c["ours"] == critic else {"more": "less", "less": "more"}.get(c["verdict"], c["verdict"])
        for c in derived["comparisons"]
        if {c["ours"], c["theirs"]} == {critic, plain} and c["metric"] == derived["metrics"][0]
    }
    if verdicts["seconds"] == "more":
        return f"{names[0]} is better at equal wall time: the critic pays for itself, if its memory is there."
    if verdicts["completions"] == "more":
        return (
            f"{names[0]} is better at equal completions and not shown to be at equal wall time: the critic pays where "
            "sampling or scoring is most of a step."
        )
    if verdicts["seconds"] == "less":
        return f"{names[1]} is better at equal wall time, and needs no critic's memory."
    return f"No difference is shown; {names[1]} needs no critic, so it is cheaper."
