"""A small run with failures injected into chosen phases of chosen steps: `python victim.py JSON`.

The JSON has `overrides` and `attacks`. An attack has role ("critic-0", or one of SERVERS), phase, step and how (kill, hang,
memory). Prints `hurt` and the seconds since the epoch at each attack; the run ends like any run of `launch/main.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import psutil

from tandem.launch.assembly import run as launch_run
from tandem.launch.compose.compose import compose
from tandem.launch.views.display import SilentDisplay
from tandem.platform.planning.validate import validate


def hang(worker: Any) -> None:
    """Blocks the worker for longer than any deadline of the test."""
    time.sleep(3600)


def exhaust(worker: Any) -> None:
    """Limits the worker to the memory that it already uses."""
    import resource

    size = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def family() -> list[psutil.Process]:
    """The processes of this run."""
    return psutil.Process().children(recursive=True)


SERVERS = {"head": "gcs_server", "raylet": "raylet"}
"""Process names of Ray's servers, by the names used in attacks."""


class Attacker(SilentDisplay):
    """A display that attacks workers in some phases of the run."""

    def __init__(self, attacks: list[dict[str, Any]]) -> None:
        self.attacks, self.at_step = attacks, 0

    def phase(self, name: str) -> None:
        """Attacks the victims at the beginning of their phase."""
        self.at_step += name == "step"
        due = [attack for attack in self.attacks if (attack["step"], attack["phase"]) == (self.at_step, name)]
        for attack in due:
            self.attacks.remove(attack)  # a phase may begin again in the same step
            self.attack(attack["role"], attack["how"])
            print(f"hurt {time.time()}\n", end="", flush=True)  # in one write, because Ray writes to the same pipe

    def attack(self, role: str, how: str) -> None:
        """Carries out one attack."""
        import ray

        if role in SERVERS:
            for server in [child for child in family() if child.name() == SERVERS[role]]:
                server.kill()
            return
        if role == "rollout-new":  # a replacement has no actor name
            newest = max((child for child in family() if "RolloutWorker" in child.name()), key=psutil.Process.create_time)
            newest.kill()
            return
        victim = ray.get_actor(role)
        if how == "kill":
            os.kill(ray.get(victim.__ray_call__.remote(lambda worker: os.getpid())), signal.SIGKILL)
        else:
            victim.__ray_call__.remote({"hang": hang, "memory": exhaust}[how])


def main() -> int:
    """Runs with the attacker as the display."""
    plan = json.loads(sys.argv[1])
    launch_run.make_display = lambda tracking, hidden: Attacker(plan["attacks"])
    config, given = compose(plan["overrides"])
    validate(config, given)
    return launch_run.run(config, time.time())


if __name__ == "__main__":
    sys.exit(main())
