"""A small run in which one worker is hurt in a chosen phase of a chosen step: `python victim.py JSON`.

The JSON has role ("critic-0", or "head" for Ray's), phase, step, how (kill, hang, memory) and overrides. Prints `hurt` and
the seconds since the epoch when it happens; the run ends as any run of `launch/main.py` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import psutil

from tandem.launch import run as launch_run
from tandem.launch.compose import compose
from tandem.launch.display import SilentDisplay
from tandem.platform.validate import validate


def hang(worker: Any) -> None:
    """Blocks the worker for longer than any deadline of the test."""
    time.sleep(3600)


def exhaust(worker: Any) -> None:
    """Leaves the worker no memory beyond what it has."""
    import resource

    size = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


class Attacker(SilentDisplay):
    """Sees the phases of the run from the outside, as a display does, and acts in one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.at_step, self.done = plan, 0, False

    def phase(self, name: str) -> None:
        """Hurts the victim at the beginning of the chosen phase."""
        self.at_step += name == "step"
        if not self.done and name == self.plan["phase"] and self.at_step == self.plan["step"]:
            self.done = True
            self.attack(self.plan["role"], self.plan["how"])

    def attack(self, role: str, how: str) -> None:
        """Says when, and acts."""
        import ray

        if role == "head":
            servers = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
            print("hurt", time.time(), flush=True)
            for server in servers:
                server.kill()
            return
        victim = ray.get_actor(role)
        pid = ray.get(victim.__ray_call__.remote(lambda worker: os.getpid()))
        if how == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            victim.__ray_call__.remote({"hang": hang, "memory": exhaust}[how])
        print("hurt", time.time(), flush=True)


def main() -> int:
    """Runs with the attacker as the display."""
    plan = json.loads(sys.argv[1])
    launch_run.make_display = lambda tracking: Attacker(plan)
    config, given = compose(plan["overrides"])
    validate(config, given)
    return launch_run.run(config, time.time())


if __name__ == "__main__":
    sys.exit(main())
