r"""The form of an answer: a list, a set, a tuple or interval, a matrix, a relation, a region of the real line.

All texts are in the form of `grading.plain`: without `\left`, `$` or `\text`, with `\{` for the braces of a set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tandem.platform.rewards.latex import GREEK, Reading, Unreadable, read
from tandem.platform.rewards.quantities import GROUPED

_OPENING, _CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:,[0-9]+)+|.", re.DOTALL)
_WORD = re.compile(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_CONDITIONAL = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_SIGN = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|[<>=]")
_NAME = re.compile(rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))}))(?:_(?:[A-Za-z0-9]|\{{[A-Za-z0-9]+\}}))?")
_NAMES = re.compile(rf"\((?:{_NAME.pattern})(?:,(?:{_NAME.pattern}))+\)")
_FUNCTION = re.compile(rf"(?:{_NAME.pattern})\([A-Za-z](?:,[A-Za-z])*\)|[A-Za-z]_[a-z]")
_CONDITION = re.compile(rf"\\\{{({_NAME.pattern})(?:\\in ?\\mathbb\{{R\}})?[|:](.*)\\\}}")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)

SetTree = tuple[Any, ...]
"""("union" | "intersection" | "difference", parts...), ("interval", low, high, low is open, high is open),
("points", readings...) or ("reals",)."""


@dataclass(frozen=True)
class Relation:
    """Sides with signs between them. Example: `1<x<2` is `Relation(("1", "x", "2"), ("<", "<"))`."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]

    @property
    def is_equation(self) -> bool:
        """Whether it is a single equation with two sides."""
        return self.signs == ("=",)


@dataclass(frozen=True)
class Region:
    """A part of the real line. Example: `x\\in[1,2]` has the variable x, `[1,2]` has no variable."""

    variable: str | None
    members: SetTree
    is_inequality: bool = False


def split(text: str, pattern: re.Pattern[str], *, in_brackets: bool = False) -> tuple[list[str], list[str]]:
    """(parts of a text between the matches of `pattern` outside all brackets, the matches).

    Commas between groups of three digits do not separate parts, unless the text was in brackets.
    """
    parts, matches, depth, start, place = [], [], 0, 0, 0
    while place < len(text):
        piece = _PIECE.match(text, place)
        assert piece
        match = pattern.match(text, place) if depth == 0 else None
        if match and match.end() > place:
            parts.append(text[start:place].strip())
            matches.append(match[0].strip())
            start = place = match.end()
            continue
        token = piece[0]
        depth += (token in _OPENING) - (token in _CLOSING)
        is_list = "," in token and token[0].isdigit() and (in_brackets or not re.fullmatch(GROUPED, token))
        place += len(token.partition(",")[0]) if is_list else len(token)
    return [*parts, text[start:].strip()], matches


_COMMA = re.compile("[,;]")
_SEPARATOR = re.compile(rf"\s*[,;]?\s*{_WORD.pattern}\s*|[,;]")


def listed(text: str) -> list[str]:
    r"""The items of `1,2`, `x=1 or x=2` and `1\pm\sqrt{2}`; only the text itself if it is no list."""
    parts, _ = split(text, _SEPARATOR)
    items: list[str] = []
    for part in parts:
        if part.count("\\pm") == 1 and "\\mp" not in part:
            items += [re.sub(r"\\pm ?", sign, part) for sign in "+-"]
        else:
            items.append(part)
    return items


def are_joined_otherwise(text: str, other: str) -> bool:
    """Whether one text joins items by `or` and the other by `and`, where it matters: inequalities, letters and words."""
    items, words = split(text, _WORD)
    others, other_words = split(other, _WORD)
    if not words or not other_words or set(words) == set(other_words):
        return False
    return any(_CONDITIONAL.search(item) or item.replace(" ", "").isalpha() for item in items + others)


def members(text: str) -> list[str] | None:
    r"""The members of a list or set, in any order: `x=1` and `x=2` for `x\in\{1,2\}`. None for other texts."""
    items = listed(text)
    if len(items) > 1:
        return items
    membership = relation(text)
    name = membership.sides[0] if membership.signs == ("\\in",) and is_name(membership.sides[0]) else ""
    group = bracketed(membership.sides[1] if name else text)
    if group is None or group[0] != "{}":
        return None
    return [f"{name}={item}" for item in group[1]] if name else group[1]


def bracketed(text: str) -> tuple[str, list[str]] | None:
    r"""The outer brackets and the items of `(a,b)`, `[a,b)` or `\{a,b\}`; None for other texts."""
    opening = next((sign for sign in ("\\{", "{", "(", "[") if text.startswith(sign)), "")
    closing = next((sign for sign in ("\\}", "}", ")", "]") if text.endswith(sign)), "")
    if not opening or not closing or len(text) < len(opening) + len(closing):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    if not _is_balanced(inner):
        return None  # (1)(2)
    items, _ = split(inner, _COMMA, in_brackets=True)
    kind = opening[-1] + closing[-1]
    if len(items) == 1 and opening != "\\{":
        return None
    return kind, [item for item in items if item or len(items) > 1]


def _is_balanced(text: str) -> bool:
    """Whether every closing bracket in the text has an opening bracket before it."""
    depth = 0
    for piece in _PIECE.findall(text):
        depth += (piece in _OPENING) - (piece in _CLOSING)
        if depth < 0:
            return False
    return depth == 0


def matrix(text: str) -> tuple[bool, list[list[str]]] | None:
    """(whether it is a determinant, the cells by row); None if the text is no matrix."""
    match = _MATRIX.fullmatch(text)
    if not match:
        return None
    rows = [row for row in re.split(r"\\newrow ?", match[2]) if row.strip()]
    return match[1] in ("vmatrix", "Vmatrix"), [[cell.strip() for cell in row.split("&")] for row in rows]


def relation(text: str) -> Relation:
    """The sides and signs of a text; a text without any sign is one side."""
    sides, signs = split(text, _SIGN)
    return Relation(tuple(sides), tuple(signs))


def named(one: Relation) -> tuple[str, str] | None:
    """Name and value of an equation such as `x=5` or `5=x`; None for other relations."""
    if not one.is_equation:
        return None
    for name, value in (one.sides, one.sides[::-1]):
        if is_name(name) and not is_name(value):
            return name, value
    return None


def is_name(text: str) -> bool:
    """Whether the text is a variable, a function or a tuple of variables, which may be left out before `=`."""
    return bool(_NAME.fullmatch(text) or _NAMES.fullmatch(text)) or is_function(text)


def is_function(text: str) -> bool:
    """Whether the text is `f(x)`, or a term `a_n` of a sequence."""
    return bool(_FUNCTION.fullmatch(text))


def region(text: str) -> Region | None:
    """The part of the real line that a text describes, or None."""
    try:
        return _region(text)
    except Unreadable:
        return None


def _region(text: str) -> Region | None:
    condition = _CONDITION.fullmatch(text)
    if condition:
        inner = _region(condition[2])
        return Region(None, inner.members) if inner and inner.variable == condition[1] else None
    parts, words = split(text, _WORD)
    if len(parts) > 1:
        regions = [_region(part.strip(", ")) for part in parts]
        variables = {part.variable if part else None for part in regions}
        if None in variables or len(variables) > 1 or len(set(words)) > 1:
            return None
        kind = "union" if words[0] == "or" else "intersection"
        first = regions[0]
        assert first
        return Region(first.variable, (kind, *(part.members for part in regions if part)), first.is_inequality)
    statement = relation(text)
    if statement.signs == ("\\in",) and is_name(statement.sides[0]):
        return _with_variable(statement.sides[0], _members(statement.sides[1]))
    if statement.signs:
        return _inequality(statement)
    members = _members(text)
    return Region(None, members) if members else None


def _with_variable(name: str, members: SetTree | None) -> Region | None:
    return Region(name, members) if members else None


def _inequality(statement: Relation) -> Region | None:
    """The region of a solved inequality: a variable between constants."""
    sides, signs = statement.sides, statement.signs
    if signs[0] in (">", "\\ge"):
        turned = {">": "<", "\\ge": "\\le"}
        sides, signs = sides[::-1], tuple(turned.get(sign, "") for sign in reversed(signs))
    names = [side for side in sides if is_name(side)]
    if len(names) != 1 or len(sides) > 3:
        return None
    place = sides.index(names[0])
    if len(sides) == 2 and signs == ("\\ne",):
        return Region(names[0], ("difference", ("reals",), ("points", read(sides[1 - place]))), True)
    if not set(signs) <= {"<", "\\le"} or (len(sides) == 3 and place != 1):
        return None
    infinite = Reading("\\infty", frozenset())
    low = read(sides[place - 1]) if place else Reading("-\\infty", frozenset())
    high = read(sides[place + 1]) if place + 1 < len(sides) else infinite
    if low.variables or high.variables:
        return None
    is_open = [place == 0 or signs[place - 1] == "<", place + 1 == len(sides) or signs[place] == "<"]
    return Region(names[0], ("interval", low, high, *is_open), True)


_SET_SIGNS = {"union": "cup", "intersection": "cap", "difference": "setminus"}


def _members(text: str) -> SetTree | None:
    r"""The set that a text such as `[1,2)\cup\{5\}` describes, or None."""
    for kind, sign in _SET_SIGNS.items():
        parts, _ = split(text, re.compile(rf"\\{sign}(?![A-Za-z])"))
        if len(parts) > 1 and (kind != "difference" or len(parts) == 2):
            trees = [_members(part) for part in parts]
            return None if None in trees else (kind, *trees)
    if text in ("\\mathbb{R}", "\\mathbb R"):
        return ("reals",)
    if text == "\\emptyset":
        return ("points",)
    group = bracketed(text)
    if group is None:
        is_parenthesised = text.startswith("(") and text.endswith(")") and _is_balanced(text[1:-1])
        return _members(text[1:-1]) if is_parenthesised else None
    kind, items = group
    if kind == "{}":
        return ("points", *(read(item) for item in items))
    return ("interval", *(read(item) for item in items), kind[0] == "(", kind[1] == ")") if len(items) == 2 else None
