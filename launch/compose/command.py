"""What every command does: takes its arguments, and answers errors with a message and an exit code."""

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
OURS = "tandem."  # modules whose exceptions say all that there is to say
SCRIPTS = {
    "main": "train",
    "critic_vs_group": "benchmark",
    **{name: name for name in ("evaluate", "export", "runs", "report", "doctor", "algorithms", "settings")},
}
"""Files of commands, and what `tandem` calls them."""

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # the display is ours
    "TRANSFORMERS_VERBOSITY": "error",  # what of its warnings matters, we check ourselves
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    # OpenMP threads that spin while they wait make a step ten times slower as soon as another process wants a core.
    "OMP_WAIT_POLICY": "passive",
}
"""Environment of every command unless it is set already: libraries read it when they are loaded, and a private Ray hands it
to every worker."""


class Call:
    """How this process was called."""

    by_name = False  # `tandem train`, not `python launch/main.py`


def as_called(text: str) -> str:
    """A text that names commands as files, with the names by which they were called."""
    if not Call.by_name:
        return text
    return re.sub(
        r"(?:python )?(?:launch|benchmarks)/(\w+)\.py",
        lambda found: f"tandem {SCRIPTS[found[1]]}" if found[1] in SCRIPTS else found[0],
        text,
    )


def command(
    problem: str, usage: str = "", settings: Callable[[], str] | None = None
) -> Callable[[Main], Callable[..., int]]:
    """Makes a command of a function from arguments to an exit code; without arguments it takes those of the process.

    One of tandem's own errors is told in its words behind `problem`, with exit code 2; any other with its traceback, with
    1; Ctrl-C gives 130; a reader that has gone, as `| head` does, is no error.

    Args:
        usage: printed for -h and --help.
        settings: makes what is printed for --settings.
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
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left at its end
                return 0
            except Exception as error:
                if type(error).__module__.startswith(OURS):
                    say(f"{problem}: {error}", error=True)
                    return 2
                say(traceback.format_exc(), error=True)
                return 1

        return run

    return decorate
