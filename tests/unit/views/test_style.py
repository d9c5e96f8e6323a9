"""The palettes of pages: text is readable in light and dark mode."""

from __future__ import annotations

import re

import pytest

from tandem.launch.views.palette import COLOURS, DARK, LIGHT
from tandem.launch.views.rendering import TEMPLATES, rendered

STYLE = rendered(TEMPLATES / "style.css")

TEXTS, GROUNDS = ("text", "muted", "accent", "good", "bad"), ("back", "card", "soft")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def palettes() -> list[dict[str, str]]:
    """The palettes as the style of a page says them: light, dark."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE)
    assert len(blocks) == 2
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block, re.IGNORECASE)) for block in blocks]


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_the_style_holds_both_palettes() -> None:
    assert palettes() == [LIGHT, DARK]
    assert "prefers-color-scheme: dark" in STYLE
    assert LIGHT.keys() == DARK.keys()
    assert set(re.findall(r"var\(--(\w+)\)", STYLE)) <= LIGHT.keys()


@pytest.mark.parametrize("number", [0, 1])
def test_text_can_be_read(number: int) -> None:
    palette = palettes()[number]
    for text in TEXTS:
        for ground in GROUNDS:
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)


def test_curves_stand_out_in_the_dark() -> None:
    """3 to 1 is what the standard asks of graphics. In the light they are Okabe and Ito's, and differ in dash too."""
    assert len({DARK[f"s{number}"] for number in range(len(COLOURS))}) == len(COLOURS)
    for number in range(len(COLOURS)):
        assert contrast(DARK[f"s{number}"], DARK["card"]) >= 3


def test_colours_are_named_in_the_palettes_alone() -> None:
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b", (TEMPLATES / "style.css").read_text())
