"""Results of benchmark runs whose numbers are set by hand."""

from __future__ import annotations

from typing import Any

MEMORY = {"weights": 4, "gradients": 4, "optimizer": 8, "activations": 2, "baseline": 80, "peak": 100}
SHAPE = {"layers": 1, "attention_width": 4, "block_parameters": 100, "head_parameters": 20}


def run(arm: str = "one", seed: int = 0, steps: int = 4, accuracy: float = 0.5, **columns: list[float]) -> dict[str, Any]:
    """A run's raw results: two-second steps of 8 samples, evaluated at the beginning and at the end."""
    made: dict[str, list[float]] = {
        "time/step_s": [2.0] * steps,
        "time/generate_s": [1.0] * steps,
        "time/update_actor_s": [0.5] * steps,
        "samples/sampled": [8.0] * steps,
        "sampling/rounds": [1.0] * steps,
        "tokens/prompt": [40.0] * steps,
        "tokens/response": [24.0] * steps,
        "policy/epochs": [1.0] * steps,
        "reward/mean": [accuracy] * steps,
    }
    return {
        "arm": arm,
        "seed": seed,
        "status": "finished",
        "error": None,
        "identity": {"first_weights": "w", "data": "d"},
        "startup_s": 3.0,
        "devices": 2.0,
        "steps": made | columns,
        "evals": {"eval/held/greedy": [[0, 0.4], [steps, accuracy]]},
        "memory": {"actor": dict(MEMORY)} | ({"critic": dict(MEMORY)} if arm == "one" else {}),
    }


def raw(runs: list[dict[str, Any]], **plan: Any) -> dict[str, Any]:
    """Raw results of arms `one` (with a critic) and `two`."""
    names = list(dict.fromkeys(one["arm"] for one in runs))
    shared = {"is_plain": True, "group": 4, "prompts": 2, "actor": SHAPE, "differs": {}}
    made = [
        {"name": name, "label": name.title(), "algo": name, "critic": SHAPE if name == "one" else None, **shared}
        for name in names
    ]
    return {
        "plan": {
            "seeds": sorted({one["seed"] for one in runs}),
            "skip_steps": 1,
            "completions": 8,
            "comparisons": [],
            **plan,
        },
        "machine": {"cores": 2, "gpus": [], "versions": {"torch": "x"}},
        "peak_flops": 1e9,
        "model": {"path": "m", "parameters": 120, "digest": "w"},
        "data": "sums",
        "settings": {
            "run.steps": 4,
            "train.minibatches": 2,
            "train.epochs_per_batch": 1,
            "model.gradient_checkpointing": False,
            "cluster.name": "local",
        },
        "arms": made,
        "runs": runs,
    }
