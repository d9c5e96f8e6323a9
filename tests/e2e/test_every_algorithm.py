"""Every algorithm of `conf/algo/` learns the embedded task, in this process and without Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose, config_groups
from tandem.platform.planning.validate import validate

pytestmark = pytest.mark.slow

STEPS = 10


@pytest.mark.parametrize("algo", config_groups()["algo"])
def test_held_out_accuracy_rises(tmp_path: Path, algo: str) -> None:
    fixed = [f"run.steps={STEPS}", f"run.dir={tmp_path}", "run.name=r", "cluster=inline", "tracking.console=none"]
    own = ["critic.warmup_steps=3"] if algo == "vapo" else []
    config, given = compose([f"algo={algo}", *fixed, *own])
    assert validate(config, given) == []
    assert run(config, time.time()) == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    before, after = (summary[key]["eval/addition/greedy"] for key in ("eval_first", "eval_last"))
    assert before <= 0.6
    assert after >= before + 0.05
    steps = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    for step in steps[1:]:  # steps[0] is the evaluation before training
        assert step["samples/sampled"] == step["samples/trained"] + step["samples/filtered"] + step["samples/leftover"]
    # In the first update, a critic whose head is zero has no gradient below the head.
    assert all(step["update/unmoved_tensors"] == 0 for step in steps[2:])
