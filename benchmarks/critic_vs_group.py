"""Measures the costs and benefits of the critic: PPO and GRPO side by side on one model, data set and machine.

python benchmarks/critic_vs_group.py                                   # the embedded task: at most 20 minutes on 2 cores
python benchmarks/critic_vs_group.py arms=[ppo_8,grpo_8] model.path=FOLDER data.train=FILE data.eval=FILE
python benchmarks/critic_vs_group.py report=outputs/critic_vs_group    # the report again, without training

conf/benchmark/critic_vs_group.yaml defines arms, controls and comparisons. Set its keys as above; any other setting applies
to every run. The results are in out=FOLDER. To resume an interrupted benchmark, repeat the command.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from tandem.launch.compose.command import command
from tandem.launch.settings import settings_table
from tandem.platform.system.terminal import say


def settings() -> str:
    """The benchmark's file of settings with its comments, and the settings of every run."""
    import tandem.conf

    file = Path(tandem.conf.__file__).parent / "benchmark" / "critic_vs_group.yaml"
    return f"{file.read_text()}\n# Any other setting applies to every run. {settings_table()}"


@command("configuration error", __doc__ or "", settings)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 done, 2 not started, 130 interrupted)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the run in progress
    from tandem.benchmarks.ab.runs import Interrupted

    try:
        return _benchmark(arguments)
    except (KeyboardInterrupt, Interrupted) as error:
        say(f"interrupted; repeat the command to resume. {error}", error=True)
        return 130


def _benchmark(arguments: list[str]) -> int:
    from tandem.benchmarks.ab.arms import load_plan, make_arms
    from tandem.benchmarks.ab.page import rebuild, save, write
    from tandem.benchmarks.ab.results import derive, describe
    from tandem.benchmarks.ab.runs import run_all

    plan, overrides = load_plan(arguments)
    if plan.report is not None:
        say(rebuild(Path(plan.report)))
        return 0
    arms = make_arms(plan, overrides)
    about, out = describe(plan, arms), Path(plan.out)
    raw: dict[str, Any] = {**about, "runs": run_all(arms, plan.seeds, out, about["machine"])}
    save(raw, out)
    say(write({**raw, "derived": derive(raw)}, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
