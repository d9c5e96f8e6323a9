"""A run whose processes are killed at random and that is restarted until it finishes equals an undisturbed run.

By default, all processes are killed at once; with `--everywhere`, dozens of processes are then killed one after the other.
`KILL_LOOP_SEED` selects other processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose

pytestmark = pytest.mark.slow

SETTINGS = (
    *("algo=ppo", "algo.entropy_coef=0.1", "algo.kl_reward_coef=0.01", "algo.kl_target=0.1", "actor.lr=1e-3"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "task.eval_size=3"),
    *("eval.every=0", "eval.before_training=false", "checkpoint.every=2", "run.name=r"),
)
ON_RAY = ("placement.threads_per_rank=1", "cluster.num_cpus=2", "cluster.call_timeout_s=40", "tracking.console=plain")
END_S = 90
DIFFERENT = ("time/", "memory/", "tokens/response_per_s", "restarts/")


@dataclass
class Loop:
    """Starts the run repeatedly and kills its processes."""

    command: list[str]
    folder: Path
    chance: random.Random
    starts: int = 0
    attacks: int = 0
    kills: list[str] = field(default_factory=list)

    def start(self) -> psutil.Popen:
        """Starts the run in its own session."""
        self.starts += 1
        return psutil.Popen(self.command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def steps(self) -> int:
        """The number of steps on record so far."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for_a_moment(self, driver: psutil.Popen) -> None:
        """Waits until a random moment during the startup or a step."""
        if self.chance.random() < 0.25:
            self.sleep(driver, self.chance.uniform(0.5, 8.0))
            return
        goal = self.steps() + self.chance.randint(1, 12)
        deadline = time.monotonic() + END_S
        while driver.poll() is None and self.steps() < goal and time.monotonic() < deadline:
            time.sleep(0.01)
        self.sleep(driver, self.chance.uniform(0.0, 0.5))

    def kill(self, driver: psutil.Popen, everything: bool) -> None:
        """Kills a random process of the run, or all processes at once."""
        family = family_of(driver)
        self.attacks += bool(family)
        victims = family if everything else [self.chance.choice(family)] if family else []
        for victim in victims:
            try:
                name = victim.name()
                victim.kill()
            except psutil.NoSuchProcess:
                continue
            self.kills.append(name)

    def wait_for_the_end(self, driver: psutil.Popen) -> int:
        """Waits until all processes of the run have ended; returns the exit code."""
        family: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + END_S
        while driver.poll() is None and time.monotonic() < deadline:
            family |= {child.pid: child for child in family_of(driver)}
            time.sleep(0.2)
        assert driver.poll() is not None, f"the run hangs after the kill of {self.kills[-1:]}"
        _, alive = psutil.wait_procs(list(family.values()), timeout=60)
        assert [process.name() for process in alive] == [], f"left behind after the kill of {self.kills[-1:]}"
        return int(driver.returncode)

    def sleep(self, driver: psutil.Popen, seconds: float) -> None:
        """Waits up to `seconds`, or until the driver ends."""
        deadline = time.monotonic() + seconds
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)


def family_of(driver: psutil.Popen) -> list[psutil.Process]:
    """The run's driver and all of its descendants."""
    try:
        return [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def measured(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(DIFFERENT)} for line in lines]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    place = folder / "checkpoints" / f"step-{step:06d}"
    return {
        f"{path.parent.name}/{name}": tensor
        for path in sorted(place.glob("*/*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def test_killed_at_random_it_is_the_run_that_nobody_disturbed(
    tiny_path: str, tmp_path: Path, repo: Path, request: pytest.FixtureRequest
) -> None:
    many = request.config.getoption("--everywhere", default=False)
    steps, attacks = (200, 40) if many else (24, 1)
    seed = int(os.environ.get("KILL_LOOP_SEED", "0"))
    alike = [*SETTINGS, f"model.path={tiny_path}", f"run.steps={steps}"]
    config, _ = compose([*alike, "cluster=inline", "tracking.console=none", f"run.dir={tmp_path / 'straight'}"])
    assert run(config, time.time()) == 0

    command = [sys.executable, str(repo / "launch/main.py"), *alike, *ON_RAY, f"run.dir={tmp_path / 'killed'}"]
    folder = tmp_path / "killed" / "r"
    loop = Loop(command, folder, random.Random(seed))
    code = None
    while code != 0:
        assert loop.starts <= attacks, "it does not get on"
        driver = loop.start()
        try:
            while driver.poll() is None and loop.attacks < attacks:
                loop.wait_for_a_moment(driver)
                loop.kill(driver, everything=loop.attacks == 0)
                loop.sleep(driver, 5.0)
            code = loop.wait_for_the_end(driver)
        finally:
            for process in family_of(driver):
                process.kill()
    print(f"\n{loop.starts} starts, {loop.attacks} attacks: {' '.join(loop.kills)}", file=sys.__stderr__)
    assert measured(folder) == measured(tmp_path / "straight" / "r")
    straight, killed = state(tmp_path / "straight" / "r", steps), state(folder, steps)
    assert straight.keys() == killed.keys()
    assert len(straight) > 100
    assert [name for name in straight if not torch.equal(straight[name], killed[name])] == []
