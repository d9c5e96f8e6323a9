"""Writes a run's report as one self-contained page: `python launch/report.py outputs/NAME` writes `report.html` there."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.launch.compose.command import as_called, command
from tandem.launch.views.page import write_report
from tandem.platform.system.terminal import say

USAGE = "usage: python launch/report.py outputs/NAME\n\nWrites report.html into the folder of the run."


@command("report", USAGE)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 written, 2 not)."""
    if len(arguments) != 1:
        say(as_called(USAGE))
        return 2
    say(write_report(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
