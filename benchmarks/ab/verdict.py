"""What the numbers say, in sentences; nothing here is fixed text about who wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.platform.system.text import human_bytes

NAMES = ("algo.name", "algo.paper")  # of a record, which change nothing by themselves
HELD = ("weights", "gradients", "optimizer", "activations")
SAID_AXES = {"completions": "equal completions", "seconds": "equal wall time", "tokens": "equal generated tokens"}
JUDGED = ("more", "less", "no difference shown")
SHOWN = 3  # comparisons in the paragraph; all are in the table


def sentences(results: Mapping[str, Any]) -> list[str]:
    """The verdict: conditions, what the critic cost, what it bought, what group sampling cost, how far this goes."""
    return [
        _conditions(results),
        *_critic(results),
        *_comparisons(results),
        *_groups(results),
        *_crashes(results),
        _reach(results),
    ]


def label(results: Mapping[str, Any], name: str) -> str:
    """The words for an arm."""
    return next(str(arm["label"]) for arm in results["arms"] if arm["name"] == name)


def difference_text(comparison: Mapping[str, Any]) -> str:
    """'+0.012 [-0.004, +0.030]'."""
    found = comparison["difference"]
    if found is None:
        return "-"
    interval = f" [{found['low']:+.3f}, {found['high']:+.3f}]" if found["seeds"] > 1 else ""
    return f"{found['value']:+.3f}{interval}"


def share_text(share: Mapping[str, float]) -> str:
    """'43% [42%, 44%]'; one seed has no interval."""
    interval = f" [{share['low']:.0%}, {share['high']:.0%}]" if share["seeds"] > 1 else ""
    return f"{share['value']:.0%}{interval}"


def multiplicity(results: Mapping[str, Any]) -> str:
    """How many of the verdicts would claim a difference between equal arms."""
    judged = sum(one["verdict"] in JUDGED for one in results["derived"]["comparisons"])
    return (
        f"{judged} comparisons are judged, of few independent runs: with five seeds about 9 in 100 of equal arms would be "
        "called different."
        if judged
        else ""
    )


def critic_bytes(arm: Mapping[str, Any]) -> float:
    """What the critic's tensors take: weights, gradients, optimizer, activations."""
    return float(sum(arm["memory"]["critic"][item] for item in HELD))


def where(machine: Mapping[str, Any]) -> str:
    """The devices in words."""
    return ", ".join(machine["gpus"]) or f"{machine['cores']} CPU cores"


def finished(results: Mapping[str, Any]) -> dict[str, Any]:
    """By name, what the arms with a finished run cost and learned."""
    return {name: arm for name, arm in results["derived"]["arms"].items() if arm["finished"]}


def _conditions(results: Mapping[str, Any]) -> str:
    plan, settings, model = results["plan"], results["settings"], results["model"]
    differ = list(dict.fromkeys(key for arm in results["arms"] for key in arm["differs"] if key not in NAMES)) or [
        "nothing"
    ]
    return (
        f"Trained is {model['path']} ({model['parameters'] / 1e6:.3g} M parameters) on {results['data']}, on "
        f"{where(results['machine'])}: {settings['run.steps']} training steps of {plan['completions']} completions "
        f"for each arm, {len(plan['seeds'])} paired seeds. Arms have first weights, data and settings in common, but for "
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
            f"{human_bytes(critic_bytes(arm))} of tensors, beside {human_bytes(actor)} of the policy's training."
        )
    return said


def _comparisons(results: Mapping[str, Any]) -> list[str]:
    derived = results["derived"]
    metric = derived["metrics"][0]
    pairs = list(dict.fromkeys((one["ours"], one["theirs"]) for one in derived["comparisons"]))[:SHOWN]
    said = []
    for ours, theirs in pairs:
        parts = []
        for axis, words in SAID_AXES.items():
            one = next(
                c
                for c in derived["comparisons"]
                if (c["ours"], c["theirs"], c["metric"], c["axis"]) == (ours, theirs, metric, axis)
            )
            parts.append(f"{difference_text(one)} at {words} ({one['verdict']})")
        said.append(f"{label(results, ours)} against {label(results, theirs)}, {metric}: " + "; ".join(parts) + ".")
    return said


def _groups(results: Mapping[str, Any]) -> list[str]:
    arms = finished(results)
    sizes = {arm["name"]: arm for arm in results["arms"] if arm["critic"] is None and arm["name"] in arms}
    parts = [
        f"{arm['label']} generated {arms[name]['costs']['response_tokens_per_prompt']:.0f} tokens for each prompt"
        for name, arm in sizes.items()
    ]
    return ["Group sampling in place of a critic: " + "; ".join(parts) + "."] if parts else []


def _crashes(results: Mapping[str, Any]) -> list[str]:
    lost = {name: arm for name, arm in results["derived"]["arms"].items() if arm["errors"]}
    return [f"{label(results, name)} did not finish: {'; '.join(arm['errors'])}." for name, arm in lost.items()]


def _reach(results: Mapping[str, Any]) -> str:
    return (
        "Brackets are 95 % paired bootstrap intervals over seeds; where they hold 0 no difference is shown, which is not "
        "the same as none. All of it speaks of this model, task, length of training and these settings alone; an arm that "
        "is tuned otherwise may do better."
    )
