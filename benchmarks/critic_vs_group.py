"""What the critic costs and what it buys: PPO and GRPO side by side on one model, data set and machine.

python benchmarks/critic_vs_group.py                                   # the embedded task: at most 20 minutes on 2 cores
python benchmarks/critic_vs_group.py arms=[ppo_8,grpo_8] model.path=FOLDER data.train=FILE data.eval=FILE
python benchmarks/critic_vs_group.py report=outputs/critic_vs_group    # the report again, without training

Arms, controls and comparisons are conf/benchmark/critic_vs_group.yaml; its keys are given as here, and any other setting is
one of every run. The results are in out=FOLDER; an interrupted benchmark goes on when the same command is given again.
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
    """The benchmark's own settings with their values, as its file explains them, and those of every run."""
    import tandem.conf

    own = Path(tandem.conf.__file__).parent / "benchmark" / "critic_vs_group.yaml"
    return f"{own.read_text()}\n# Any other setting is one of every run. {settings_table()}"


@command("configuration error", __doc__ or "", settings)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 done, 2 not started, 130 interrupted)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run under way ends with us
    from tandem.benchmarks.ab.runs import Interrupted

    try:
        return _benchmark(arguments)
    except (KeyboardInterrupt, Interrupted) as error:
        say(f"interrupted; the same command goes on from here. {error}", error=True)
        return 130


def _benchmark(arguments: list[str]) -> int:
    from tandem.benchmarks.ab.arms import load_plan, make_arms
    from tandem.benchmarks.ab.page import rebuild, save, write
    from tandem.benchmarks.ab.results import derive, describe
    from tandem.benchmarks.ab.runs import run_all

    plan, given = load_plan(arguments)
    if plan.report is not None:
        say(rebuild(Path(plan.report)))
        return 0
    arms = make_arms(plan, given)
    about, out = describe(plan, arms), Path(plan.out)
    raw: dict[str, Any] = {**about, "runs": run_all(arms, plan.seeds, out, about["machine"])}
    save(raw, out)
    say(write({**raw, "derived": derive(raw)}, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
