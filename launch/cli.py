"""The `tandem` command: `tandem train algo=ppo`, `tandem runs`, `tandem settings lr`.

Each subcommand runs a file of `launch/` or `benchmarks/`, and imports its dependencies only when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from tandem.launch.compose.command import SCRIPTS, Call
from tandem.platform.system.terminal import say
from tandem.platform.system.text import nearest

MEANINGS = {
    "train": "train a model with PPO, GRPO or another algorithm",
    "evaluate": "measure a model on held-out data",
    "export": "write the trained policy as a Hugging Face folder",
    "runs": "list, show and compare runs",
    "report": "write the report of a run as one HTML page",
    "doctor": "check that this machine can run tandem",
    "algorithms": "list the algorithms and their components",
    "settings": "list the settings with defaults and meanings; with words, only matching settings",
    "benchmark": "measure the costs and benefits of a critic: PPO and GRPO side by side",
}
EXAMPLES = """\
  tandem train algo=ppo                     train the embedded model on this machine
  tandem train model.path=FOLDER data.train=FILE dry_run=true
  tandem COMMAND --help                     the arguments of a command"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code of the command, or 2 if the command does not exist."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, arguments = (words[0], words[1:]) if words else ("help", [])
    if name in ("-h", "--help", "help"):
        commands = "\n".join(f"  {command:<12}{meaning}" for command, meaning in MEANINGS.items())
        say(f"usage: tandem COMMAND [ARGUMENT ...]\n\n{commands}\n\n{EXAMPLES}")
        return 0
    if name == "--version":
        say(f"tandem {version('tandem-rl')}")
        return 0
    files = {command: file for file, command in SCRIPTS.items()}
    if name not in files:
        near = "train" if "=" in name else nearest(name, files)
        hint = f"Did you mean `tandem {near}{f' {name}' if '=' in name else ''}`? " if near else ""
        say(f"{name}: no such command. {hint}`tandem --help` lists all", error=True)
        return 2
    Call.by_name = True
    folder = "benchmarks" if name == "benchmark" else "launch"
    command = import_module(f"tandem.{folder}.{files[name]}").main
    return int(command(arguments))


if __name__ == "__main__":
    sys.exit(main())
