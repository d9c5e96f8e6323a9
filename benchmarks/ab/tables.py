"""The tables of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.benchmarks.ab.doubts import doubts
from tandem.benchmarks.ab.health import EXPLAINED, LEARNT, SILENT, verdict_text
from tandem.benchmarks.ab.measure import ITEMS
from tandem.benchmarks.ab.verdict import difference_text, finished, label, multiplicity
from tandem.platform.system.text import human_bytes

Table = list[list[str]]


def all_tables(results: Mapping[str, Any]) -> list[tuple[str, str, Table]]:
    """(title, note, rows starting with the header) of every table."""
    return [
        (
            "Comparisons",
            "Ours minus theirs, on each axis at the largest budget that both reached. " + multiplicity(results),
            _comparison_rows(results),
        ),
        (
            "Did each arm work?",
            "Means over the second half of training and over seeds. A critic that explains less than "
            f"{LEARNT:g} of the variance of the returns did not learn; an arm without a critic, more than {SILENT:.0%} of "
            "whose groups have equal rewards, had no signal.",
            _health_rows(results),
        ),
        (
            "Cost of a step",
            "Means over seeds and steps, without the first steps and those that measured gradient noise." + doubts(results),
            _cost_rows(results),
        ),
        (
            "Memory",
            "Counted from tensors; `other` is the rest of the peak of the process (on CUDA: of the allocator). Roles in "
            "one process share its baseline and its peak, which includes the activations of one role at a time.",
            _memory_rows(results),
        ),
        ("Learning", "Means over steps and seeds.", _trend_rows(results)),
        ("Arms", "The settings of each arm that differ from the first arm.", _arm_rows(results)),
    ]


def _comparison_rows(results: Mapping[str, Any]) -> Table:
    head = ["ours", "theirs", "metric", "at equal", "spent", "seeds", "difference", "interquartile means"]
    rows = [[*head, "P(ours better)", "FDR", "seeds to tell", "verdict"]]
    for result in results["derived"]["comparisons"]:
        means = " / ".join(f"{value:.3f}" for value in result.get("interquartile_mean", [])) or "-"
        chance = "-" if "probability_of_improvement" not in result else f"{result['probability_of_improvement']:.2f}"
        names = [label(results, result["ours"]), label(results, result["theirs"])]
        spent = [result["axis"], f"{result['budget']:.6g}", str(len(result["seeds"]))]
        rate, seeds = result.get("false_discovery_rate"), result.get("seeds_to_tell")
        told = ["-" if rate is None else f"{rate:.2g}", "-" if seeds is None else str(seeds)]
        compared = [difference_text(result), means, chance, *told, verdict_text(results, result)]
        rows.append([*names, result["metric"], *spent, *compared])
    return rows


def _health_rows(results: Mapping[str, Any]) -> Table:
    rows = [["arm", *(f"explained variance, {name}" for name in EXPLAINED), "groups without signal", "gradient noise", ""]]
    for name, arm in finished(results).items():
        signs = arm["health"]
        numbers = [*(signs["explained"][place] for place in EXPLAINED), signs["silent"], signs["noise"]]
        shown = ["-" if number is None else f"{number:.2f}" for number in numbers]
        rows.append([label(results, name), *shown, signs["problem"] or "worked"])
    return rows


def _cost_rows(results: Mapping[str, Any]) -> Table:
    head = [
        "arm",
        "step, s",
        "critic, of a step",
        "generate, s",
        "update actor, s",
        "update critic, s",
        "response tokens/s",
    ]
    rows = [[*head, "all tokens/s", "GFLOP", "of the peak: generate", "update actor", "startup, s"]]
    for name, arm in finished(results).items():
        costs, seconds = arm["costs"], arm["costs"]["seconds"]
        wrong = arm.get("share_problems", {})
        share = {phase: "?" if phase in wrong else f"{value:.0%}" for phase, value in costs["share_of_peak"].items()}
        rows.append(
            [
                label(results, name),
                f"{seconds['step']:.3f}",
                f"{arm['critic_share']['value']:.0%}",
                f"{seconds['generate']:.3f}",
                f"{seconds.get('update_actor', 0):.3f}",
                f"{seconds['update_critic']:.3f}" if "update_critic" in seconds else "-",
                f"{costs['response_tokens_per_s']:.0f}",
                f"{costs['tokens_per_s']:.0f}",
                f"{sum(costs['flops'].values()) / 1e9:.1f}",
                share.get("generate", "-"),
                share.get("update_actor", "-"),
                f"{arm['startup_s']:.1f}",
            ]
        )
    return rows


def _memory_rows(results: Mapping[str, Any]) -> Table:
    rows = [["arm", "role", *ITEMS, "other", "peak", "explained"]]
    for name, arm in finished(results).items():
        for role, kinds in arm["memory"].items():
            shown = [_size(kinds[kind]) for kind in (*ITEMS, "other", "peak")]
            explained = f"{1 - kinds['other'] / kinds['peak']:.0%}" if kinds["peak"] else "-"
            rows.append([label(results, name), role, *shown, explained])
    return rows


def _trend_rows(results: Mapping[str, Any]) -> Table:
    arms = finished(results)
    keys = list(dict.fromkeys(key for arm in arms.values() for key in arm["trends"]))
    rows = [["arm", "finished", *keys]]
    for name, arm in arms.items():
        numbers = [f"{arm['trends'][key]:.4g}" if key in arm["trends"] else "-" for key in keys]
        rows.append([label(results, name), f"{arm['finished']} of {arm['runs']}", *numbers])
    return rows


def _arm_rows(results: Mapping[str, Any]) -> Table:
    rows = [["arm", "name", "settings"]]
    for arm in results["arms"]:
        differences = ", ".join(f"{key}={value}" for key, value in arm["differs"].items() if key != "algo.paper")
        rows.append([arm["label"], arm["name"], differences or "-"])
    return rows


def _size(value: float) -> str:
    return "-" if value == 0 else f"-{human_bytes(-value)}" if value < 0 else human_bytes(value)
