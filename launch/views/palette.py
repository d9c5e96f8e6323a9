"""The colours of pages and charts: a light and a dark palette."""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
"""Of the series of a chart, in light mode."""

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
