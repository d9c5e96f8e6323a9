"""The common part of all commands: passes arguments, and turns errors into a message and an exit code."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from tandem.platform.system.terminal import say

Main = Callable[[list[str]], int]
Decorator = Callable[[Main], Callable[..., int]]
OURS = "tandem."  # modules whose exceptions need no traceback
SCRIPTS = {
    "main": "train",
    "critic_vs_group": "benchmark",
    **{name: name for name in ("evaluate", "export", "runs", "report", "doctor", "algorithms", "settings")},
}
"""Files of commands, and their names as subcommands of `tandem`."""

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # they would disturb tandem's display
    "TRANSFORMERS_VERBOSITY": "error",  # tandem checks what matters in its warnings
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    # Waiting OpenMP threads that spin make a step ten times slower as soon as another process needs a core.
    "OMP_WAIT_POLICY": "passive",
}
"""Environment variables of every command, unless already set. Libraries read them when they are loaded, and a private Ray
passes them to every worker."""


class Call:
    """How the user called this process."""

    by_name = False  # whether as `tandem train` instead of `python launch/main.py`


def as_called(text: str) -> str:
    """A text that names commands as files, with the names changed to subcommands if `tandem` was called."""
    if not Call.by_name:
        return text
    return re.sub(
        r"(?:python )?(?:launch|benchmarks)/(\w+)\.py",
        lambda match: f"tandem {SCRIPTS[match[1]]}" if match[1] in SCRIPTS else match[0],
        text,
    )


def command(
    problem: str, usage: str = "", settings: Callable[[], str] | None = None
) -> Callable[[Main], Callable[..., int]]:
    """Makes a command from a function of arguments to an exit code. Called without arguments, it uses those of the process.

    One of tandem's own errors is printed as its message after `problem`, with exit code 2; any other error is printed as a
    traceback, with exit code 1. Ctrl-C gives 130. A closed output pipe, as with `| head`, is not an error.

    Args:
        usage: printed for -h and --help.
        settings: returns the text printed for --settings.
    """

    def decorate(main: Main) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            arguments = list(sys.argv[1:] if argv is None else argv)
            for name, value in QUIET.items():
                os.environ.setdefault(name, value)
            try:
                if usage and {"-h", "--help"} & set(arguments):
                    say(as_called(usage))
                    return 0
                if settings and "--settings" in arguments:
                    say(settings())
                    return 0
                return main(arguments)
            except KeyboardInterrupt:
                return 130
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
                return 0
            except Exception as error:
                if type(error).__module__.startswith(OURS):
                    say(f"{problem}: {error}", error=True)
                    return 2
                say(traceback.format_exc(), error=True)
                return 1

        return run

    return decorate
