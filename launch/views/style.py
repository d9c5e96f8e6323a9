"""The style of pages: a light and a dark palette, chosen by the reader's system. Pages fit a width of 400 pixels."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.launch.views.charts import COLOURS

LIGHT = {
    "back": "#f4f5f7",
    "card": "#ffffff",
    "soft": "#eef0f3",
    "text": "#171a1f",
    "muted": "#545c68",
    "line": "#dcdfe4",
    "accent": "#0b57a4",
    "good": "#146c3a",
    "bad": "#b00020",
    **{f"s{number}": colour for number, colour in enumerate(COLOURS)},
}
DARK = {
    "back": "#0f1115",
    "card": "#181b21",
    "soft": "#22262e",
    "text": "#e9ebef",
    "muted": "#a6aebb",
    "line": "#323843",
    "accent": "#83b9f7",
    "good": "#6fd39b",
    "bad": "#ff8d92",
    "s0": "#56b4e9",
    "s1": "#ff8c4c",
    "s2": "#2fc79a",
    "s3": "#e79bc4",
    "s4": "#f0b440",
    "s5": "#b7a6ff",
    "s6": "#f0f0f0",
    "s7": "#cccc66",
}
RULES = """
* { box-sizing: border-box; }
html { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--text); background: var(--back); }
body { margin: 0 auto; max-width: 1440px; padding: 24px 24px 64px; overflow-wrap: break-word; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; } h3 { font-size: 14px; margin: 20px 0 8px; }
p { max-width: 85ch; margin: 8px 0; }
code, .key { font: 12px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; color: var(--muted); }
code, .key, td, th, dd, pre { overflow-wrap: anywhere; }
.head { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px; }
.badge { border-radius: 99px; padding: 1px 12px; font-size: 13px; font-weight: 600; background: var(--soft); }
.failed, .worst { color: var(--bad); } .finished, .best { color: var(--good); }
.facts, .meta { display: flex; flex-wrap: wrap; gap: 2px 18px; color: var(--muted); font-size: 13px; margin: 6px 0 0; }
.facts b, .meta b { color: var(--text); font-weight: 600; }
.tiles, .charts, .samples { display: grid; gap: 12px; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(min(100%, 190px), 1fr)); margin: 18px 0; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.charts:has(> svg) { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.samples { grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); }
.tile, .charts > *, .sample, .about { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 22px; line-height: 1.3; white-space: nowrap; }
.tile b, .n { font-variant-numeric: tabular-nums; } .tile span { color: var(--muted); font-size: 13px; display: block; }
.charts > * { margin: 0; padding: 12px 12px 8px; min-width: 0; width: 100%; }
figcaption { display: flex; flex-direction: column; margin: 0 0 6px 2px; }
figcaption b { font-size: 15px; line-height: 1.3; }
svg { width: 100%; height: auto; display: block; font-family: inherit; }
svg .t { fill: var(--text); } svg .g { stroke: var(--line); }
svg .z { stroke: var(--text); } svg .e { stroke: var(--card); }
.about { padding: 14px 16px; margin: 0; display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 6px 20px; }
dt { color: var(--muted); } dd { margin: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 0; }
.chips code { background: var(--soft); color: var(--text); border-radius: 6px; padding: 1px 8px; }
.sample { padding: 12px 14px; min-width: 0; }
.sample > p { display: flex; gap: 10px; font-size: 13px; margin: 0 0 6px; font-weight: 600; }
pre { margin: 0 0 8px; padding: 8px 10px; white-space: pre-wrap; background: var(--soft); border-radius: 6px; }
pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; max-height: 240px; overflow-y: auto; }
pre + pre { border-left: 3px solid var(--accent); }
table { border-collapse: collapse; width: 100%; font-size: 13px; background: var(--card); } .wide { overflow-x: auto; }
.wide td, .wide th { overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: 5px 9px; border-bottom: 1px solid var(--line); }
th { background: var(--soft); position: sticky; top: 0; } td.n, th.n { text-align: right; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--accent); margin-bottom: 8px; }
@media (max-width: 560px) {
  body { padding: 16px 12px 48px; } .about { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: 8px; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile b { font-size: 19px; }
}
@media print { .charts { grid-template-columns: 1fr 1fr; } figure, .sample, tr { break-inside: avoid; } }
"""


def _variables(palette: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in palette.items())


STYLE = "\n".join(
    (
        f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}",
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}",
        *(
            f"svg .s{number} {{ stroke: var(--s{number}); }} svg .f{number} {{ fill: var(--s{number}); }}"
            for number in range(len(COLOURS))
        ),
        RULES,
    )
)
"""The CSS of a page, palettes first."""
