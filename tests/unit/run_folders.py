"""Creates a run's folder for tests that tamper with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

METRICS = [
    {"step": 0, "eval/held/greedy": 0.25, "eval/held/greedy_low": 0.125},
    {
        "step": 1,
        "reward/mean": 0.25,
        "policy/kl": None,
        "time/step_s": 2.0,
        "time/generate_s": 1.0,
        "memory/actor/weights_bytes": 2**20,
        "memory/actor/peak_bytes": 2**30,
        "response/length_mean": 7.5,
    },
]
SAMPLES = [
    {
        "group_id": 4,
        "prompt": "1+1=",
        "response": "2",
        "answer": "2",
        "reward": 1.0,
        "parts": {"exact_match": 1.0},
        "problem": "timeout",
        "advantage": 0.5,
        "logprob_gap": 0.0,
        "stop": "stop",
        "response_tokens": 1,
        "policy_version": 0,
    }
]
FILES: dict[str, Any] = {
    "config.yaml": {
        "adv_estimator": "gae",
        "run": {"name": "a", "seed": 0, "steps": None},
        "actor": {"lr": 1e-5},
        "tracking": {"tags": ["x"]},
        "reward": {"functions": {"exact_match": 1.0}},
    },
    "run.json": {"run": "a", "algo": "ppo", "tags": ["x"], "user": "ada", "host": "h", "started_at": "2026-01-01"},
    "versions.json": {"torch": "2"},
    "summary.json": {"status": "failed", "error": "why", "steps": 1, "identity": {"data": "d"}, "devices": 2.0},
    "metrics.jsonl": METRICS,
    "samples/step-000001.jsonl": SAMPLES,
}
"""By name, what the files of a run that failed after its first step hold."""


def write_run(folder: Path, files: dict[str, Any] = FILES) -> Path:
    """Writes a run's folder; a string is written to its file unchanged."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_text(name, content), encoding="utf-8", errors="surrogateescape")
    return folder


def as_text(name: str, content: Any) -> str:
    """The text of a file with this name and content."""
    if isinstance(content, str):
        return content
    if name.endswith(".yaml"):
        return yaml.safe_dump(content)
    return "".join(json.dumps(line) + "\n" for line in content) if name.endswith(".jsonl") else json.dumps(content)


def planted(content: Any, change: Callable[[Any], Any], keys: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields (place, a copy of the content in which the value or key at this place is changed) for every place."""
    for place, holder, key in _places(content, ""):
        changed = copy.deepcopy(content)
        here = next(own for at, own, name in _places(changed, "") if at == place and name == key)
        if not keys:
            here[key] = change(here[key])
        elif isinstance(here, dict):
            here[change(key)] = here.pop(key)
        else:
            continue
        assert holder is not here
        yield place, changed


def _places(content: Any, at: str) -> Iterator[tuple[str, Any, Any]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(pairs):
        yield f"{at}/{key}", content, key
        if isinstance(value, dict | list):
            yield from _places(value, f"{at}/{key}")
