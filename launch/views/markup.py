"""HTML and SVG, escaped by construction: all of it is made by `element`, and what is not its work is shown as text."""

from __future__ import annotations

from html import escape

from tandem.platform.system.terminal import shown

VOID = frozenset({"meta"})  # elements of HTML that have no end


class Markup(str):
    """Text that is markup already. Made by `element` and `together`, and of constants."""

    __slots__ = ()


def element(name: str, /, *inside: object, **attributes: object) -> Markup:
    """`<name attributes>inside</name>`; what is None is left out.

    Example: `element("td", "a < b", class_="n")` is `<td class="n">a &lt; b</td>`; `stroke_width=2` is `stroke-width="2"`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{together(*inside)}</{name}>")


def together(*parts: object) -> Markup:
    """Markup and texts one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else escape(shown(part)) for part in parts if part is not None))
