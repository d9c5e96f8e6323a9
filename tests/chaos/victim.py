"""A small run in which one worker is hurt in a chosen phase of a chosen step: `python victim.py JSON`.

The JSON has role ("critic-0"), phase, step, how ("kill", "hang", "raise", "memory"), overrides. Prints a line `hurt <seconds since
the epoch>` when it happens; the run ends as any run of `launch/main.py` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from tandem.launch import run as launch_run
from tandem.launch.compose import compose
from tandem.launch.display import SilentDisplay
from tandem.platform.validate import validate


def hang(worker: Any) -> None:
    """Blocks the worker for longer than any deadline of the test."""
    time.sleep(3600)


def exhaust(worker: Any) -> None:
    """Asks for more memory than there is."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    worker.hoard = [bytearray(1 << 28) for _ in range(64)]


def fail(worker: Any) -> None:
    """Raises, as a defect would."""
    raise RuntimeError("planted failure")


class Attacker(SilentDisplay):
    """Sees the phases of the run from the outside, as a display does, and acts in one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.step, self.done = plan, 0, False

    def phase(self, name: str) -> None:
        """Hurts the victim at the beginning of the chosen phase."""
        self.step += name == "step"
        if self.done or name != self.plan["phase"] or self.step != self.plan["step"]:
            return
        self.done = True
        import ray

        victim = ray.get_actor(self.plan["role"])
        pid = ray.get(victim.__ray_call__.remote(lambda worker: os.getpid()))
        print("hurt", time.time(), flush=True)
        if self.plan["how"] == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            victim.__ray_call__.remote({"hang": hang, "raise": fail, "memory": exhaust}[self.plan["how"]])


def main() -> int:
    """Runs with the attacker as the display."""
    plan = json.loads(sys.argv[1])
    launch_run.make_display = lambda tracking: Attacker(plan)  # type: ignore[assignment]
    config, given = compose(plan["overrides"])
    validate(config, given)
    return launch_run.run(config, time.time())


if __name__ == "__main__":
    sys.exit(main())
