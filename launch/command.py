"""What every command does: takes its arguments, and answers errors with a message and an exit code."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Sequence

from tandem.platform.terminal import say

Main = Callable[[list[str]], int]
OURS = ("tandem.", "ab.")  # modules whose exceptions say all that there is to say


def command(problem: str) -> Callable[[Main], Callable[..., int]]:
    """Makes a command of a function from arguments to an exit code; without arguments it takes those of the process.

    One of tandem's own errors is told in its words behind `problem`, with exit code 2; any other with its traceback, with
    1; Ctrl-C gives 130.
    """

    def decorate(main: Main) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                return main(list(sys.argv[1:] if argv is None else argv))
            except KeyboardInterrupt:
                return 130
            except Exception as error:
                if type(error).__module__.startswith(OURS):
                    say(f"{problem}: {error}", error=True)
                    return 2
                say(traceback.format_exc(), error=True)
                return 1

        return run

    return decorate
