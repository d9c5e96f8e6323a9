"""HTML and SVG, escaped by construction: `element` creates all markup, and escapes everything else as text."""

from __future__ import annotations

from html import escape

from tandem.platform.system.terminal import shown

VOID = frozenset({"meta"})  # HTML elements without an end tag


class Markup(str):
    """Text that is already markup. Only `element`, `together` and constants create it."""

    __slots__ = ()


def element(name: str, /, *inside: object, **attributes: object) -> Markup:
    """`<name attributes>inside</name>`; parts and attributes that are None are left out.

    Example: `element("td", "a < b", class_="n")` is `<td class="n">a &lt; b</td>`; `stroke_width=2` is `stroke-width="2"`.
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>" if name in VOID else f"<{name}{pairs}>{together(*inside)}</{name}>")


def together(*parts: object) -> Markup:
    """Concatenates markup and texts; escapes the texts."""
    return Markup("".join(part if isinstance(part, Markup) else escape(shown(part)) for part in parts if part is not None))
