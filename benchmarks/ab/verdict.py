"""States the results in sentences, derived only from the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.benchmarks.ab.health import LEARNT, SILENT, verdict_text
from tandem.platform.system.text import human_bytes

NAMES = ("algo.name", "algo.paper")  # settings without an effect on training
HELD = ("weights", "gradients", "optimizer", "activations")
SAID_AXES = {"completions": "equal completions", "seconds": "equal wall time", "tokens": "equal generated tokens"}
JUDGED = ("more", "less", "no difference shown")
SHOWN = 3  # number of comparisons in sentences; all are in the table


def sentences(results: Mapping[str, Any]) -> list[str]:
    """The verdict: conditions, costs and benefits of the critic, costs of group sampling, failures, limits."""
    return [
        _conditions(results),
        *_critic(results),
        *_did_not_work(results),
        *_comparisons(results),
        *_causes(results),
        *_groups(results),
        *_crashes(results),
        _reach(results),
    ]


def label(results: Mapping[str, Any], name: str) -> str:
    """The display name of an arm."""
    return next(str(arm["label"]) for arm in results["arms"] if arm["name"] == name)


def difference_text(comparison: Mapping[str, Any]) -> str:
    """'+0.012 [-0.004, +0.030]'."""
    difference = comparison["difference"]
    if difference is None:
        return "-"
    interval = f" [{difference['low']:+.3f}, {difference['high']:+.3f}]" if difference["seeds"] > 1 else ""
    return f"{difference['value']:+.3f}{interval}"


def share_text(share: Mapping[str, float]) -> str:
    """'43% [42%, 44%]'; one seed has no interval."""
    interval = f" [{share['low']:.0%}, {share['high']:.0%}]" if share["seeds"] > 1 else ""
    return f"{share['value']:.0%}{interval}"


def multiplicity(results: Mapping[str, Any]) -> str:
    """A note on how many verdicts would claim a difference between equal arms."""
    comparisons = results["derived"]["comparisons"]
    judged = sum(comparison["verdict"] in JUDGED for comparison in comparisons)
    if not judged:
        return ""
    rates = [rate for comparison in comparisons if (rate := comparison.get("false_discovery_rate")) is not None]
    return (
        f"{judged} comparisons have a verdict, from few independent runs: with five seeds, about 9 in 100 comparisons of "
        "equal arms would be called different. FDR is the share of false claims to expect if this comparison is claimed "
        "and all those of the same metric and budget with smaller p-values (Benjamini and Hochberg); "
        f"{sum(rate <= 0.05 for rate in rates)} of {len(rates)} have 5 % or less. Seeds to tell: how many would show the "
        "difference, if its mean and spread stayed as they are."
    )


def critic_bytes(arm: Mapping[str, Any]) -> float:
    """Bytes of the critic's tensors: weights, gradients, optimizer, activations."""
    return float(sum(arm["memory"]["critic"][item] for item in HELD))


def where(machine: Mapping[str, Any]) -> str:
    """The devices in words."""
    return ", ".join(machine["gpus"]) or f"{machine['cores']} CPU cores"


def finished(results: Mapping[str, Any]) -> dict[str, Any]:
    """The costs and learning of the arms with a finished run, by name."""
    return {name: arm for name, arm in results["derived"]["arms"].items() if arm["finished"]}


def _conditions(results: Mapping[str, Any]) -> str:
    plan, settings, model = results["plan"], results["settings"], results["model"]
    differ = list(dict.fromkeys(key for arm in results["arms"] for key in arm["differs"] if key not in NAMES)) or [
        "nothing"
    ]
    return (
        f"The trained model is {model['path']} ({model['parameters'] / 1e6:.3g} M parameters) on {results['data']}, on "
        f"{where(results['machine'])}: {settings['run.steps']} training steps of {plan['completions']} completions "
        f"for each arm, {len(plan['seeds'])} paired seeds. Arms share first weights, data and settings, except for "
        f"{', '.join(differ)}."
    )


def _critic(results: Mapping[str, Any]) -> list[str]:
    said = []
    for name, arm in finished(results).items():
        if "critic" not in arm["memory"]:
            continue
        actor = sum(arm["memory"]["actor"][item] for item in HELD)
        said.append(
            f"In {label(results, name)} the critic took {share_text(arm['critic_share'])} of a step and "
            f"{human_bytes(critic_bytes(arm))} of tensors, compared with {human_bytes(actor)} for the policy's training."
        )
    return said


def _comparisons(results: Mapping[str, Any]) -> list[str]:
    derived = results["derived"]
    metric = derived["metrics"][0]
    pairs = list(dict.fromkeys((comparison["ours"], comparison["theirs"]) for comparison in derived["comparisons"]))[:SHOWN]
    said = []
    for ours, theirs in pairs:
        parts = []
        for axis, words in SAID_AXES.items():
            comparison = next(
                c
                for c in derived["comparisons"]
                if (c["ours"], c["theirs"], c["metric"], c["axis"]) == (ours, theirs, metric, axis)
            )
            parts.append(f"{difference_text(comparison)} at {words} ({verdict_text(results, comparison)})")
        said.append(f"{label(results, ours)} against {label(results, theirs)}, {metric}: " + "; ".join(parts) + ".")
    return said


def _did_not_work(results: Mapping[str, Any]) -> list[str]:
    """A sentence for every arm that did not work: what was compared there says nothing about its method."""
    said = []
    for name, arm in finished(results).items():
        signs = arm["health"]
        if signs["problem"] is None:
            continue
        explained = {place: value for place, value in signs["explained"].items() if value is not None}
        late = "in the second half of training"
        if explained:
            places = ", ".join(f"{value:.2f} for {place}" for place, value in explained.items())
            why = f"it explained less than {LEARNT:g} of the variance of the returns {late} ({places})"
        else:
            why = f"{signs['silent']:.0%} of its groups had equal rewards {late}, more than {SILENT:.0%}"
        said.append(f"{label(results, name)}: {signs['problem']}; {why}. Its comparisons do not judge the method.")
    return said


def _causes(results: Mapping[str, Any]) -> list[str]:
    """Of each compared pair that differs in prompts per step and in having a critic, how much is due to either.

    The control has the prompts of the arm with a critic, and no critic.
    """
    derived, arms = results["derived"], {arm["name"]: arm for arm in results["arms"] if arm["name"] in finished(results)}
    differences = {
        (c["ours"], c["theirs"]): c
        for c in derived["comparisons"]
        if (c["metric"], c["axis"]) == (derived["metrics"][0], "completions")
    }
    said = []
    for ours, theirs in differences:
        one, other = arms[ours], arms[theirs]
        if one["prompts"] == other["prompts"] or bool(one["critic"]) == bool(other["critic"]):
            continue
        critic, plain = (ours, theirs) if one["critic"] else (theirs, ours)
        head = (
            f"{label(results, critic)} and {label(results, plain)} differ in prompts per step too, "
            f"{arms[critic]['prompts']} and {arms[plain]['prompts']}."
        )
        controls = [
            name
            for name, arm in arms.items()
            if not arm["critic"] and arm["prompts"] == arms[critic]["prompts"]
            if {(critic, name), (name, plain)} <= differences.keys()
        ]
        if not controls:
            said.append(
                f"{head} No arm has the same prompts without a critic, so the difference is not the critic's alone."
            )
            continue
        control = controls[0]
        parts = [difference_text(differences[pair]) for pair in ((critic, control), (control, plain))]
        said.append(
            f"{head} {label(results, control)} has {arms[control]['prompts']} prompts and no critic: at equal completions, "
            f"{parts[0]} is the critic's part and {parts[1]} the part of the prompts and the group."
        )
    return said


def _groups(results: Mapping[str, Any]) -> list[str]:
    arms = finished(results)
    sizes = {arm["name"]: arm for arm in results["arms"] if arm["name"] in arms and not arm["critic"] and arm["group"] > 1}
    parts = [
        f"{arm['label']} generated {arms[name]['costs']['response_tokens_per_prompt']:.0f} tokens for each prompt"
        for name, arm in sizes.items()
    ]
    return ["Group sampling instead of a critic: " + "; ".join(parts) + "."] if parts else []


def _crashes(results: Mapping[str, Any]) -> list[str]:
    lost = {name: arm for name, arm in results["derived"]["arms"].items() if arm["errors"]}
    return [f"{label(results, name)} did not finish: {'; '.join(arm['errors'])}." for name, arm in lost.items()]


def _reach(results: Mapping[str, Any]) -> str:
    return (
        "Brackets are 95 % paired bootstrap intervals over seeds. If an interval contains 0, no difference is shown, which "
        "does not mean that there is none. The results hold only for this model, task, training length and these settings; "
        "an arm with other tuning may do better."
    )
