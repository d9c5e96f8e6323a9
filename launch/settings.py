"""The table of all settings: `python launch/settings.py [WORD]`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from tandem.launch.compose.command import command
from tandem.platform.config.schema import Config, each_setting
from tandem.platform.config.setting import BOUNDS
from tandem.platform.system.terminal import say

USAGE = """usage: python launch/settings.py [WORD ...]

Prints every setting with its default, its choices or bounds, and its meaning; with words, only settings that contain all
of them."""


@command("settings", USAGE)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0, or 1 if no setting contains the words)."""
    table = settings_table(arguments)
    say(table or f"no setting is about {' '.join(arguments)}", error=not table)
    return 0 if table else 1


def settings_table(words: Sequence[str] = ()) -> str:
    """Every setting with its default in the schema, its choices or bounds, and its meaning.

    With words, only settings that contain all of them in name or meaning; empty if there are none.
    """
    from tandem.platform.planning.choices import choices_of  # loads torch

    lines = [
        "Defaults of the schema; conf/*.yaml and algo= override some of them (a run's config.yaml shows the result).",
        "",
    ]
    matching = [
        (key, value, meta)
        for key, value, meta in each_setting(Config())
        if all(word.lower() in f"{key} {meta.get('help', '')}".lower() for word in words)
    ]
    for key, value, meta in matching:
        bounds = [f"{words} {meta[name]:g}" for name, _, words in BOUNDS if meta.get(name) is not None]
        choices = " | ".join(choices_of(key, meta))
        allowed = f" [{choices or ', '.join(bounds)}]" if choices or bounds else ""
        default = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        lines.append(f"{key}={default}")
        lines += textwrap.wrap(f"{meta.get('help', '')}{allowed}", 110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) if matching else ""


if __name__ == "__main__":
    sys.exit(main())
