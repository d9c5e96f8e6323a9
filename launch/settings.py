"""The table of all settings, for `--settings`."""

from __future__ import annotations

import textwrap

from tandem.platform.config import Config, settings


def settings_table() -> str:
    """Every setting with its default in the schema, its choices or bounds, and its meaning."""
    lines = [
        "Defaults of the schema; conf/*.yaml and algo= set some of them anew (config.yaml of a run shows the result).",
        "",
    ]
    for key, value, meta in settings(Config()):
        bounds = [f"{words} {meta[name]:g}" for name, words in _BOUNDS if meta.get(name) is not None]
        choices = " | ".join(meta["choices"]) if meta.get("choices") else ""
        allowed = f" [{choices or ', '.join(bounds)}]" if choices or bounds else ""
        default = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        lines.append(f"{key}={default}")
        lines += textwrap.wrap(f"{meta.get('help', '')}{allowed}", 110, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


_BOUNDS = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))
