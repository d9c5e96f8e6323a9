r"""Decides whether an answer is correct: first as text and exact number, then by its form and exact algebra.

These answers count as equal to the reference answer, the gold:
- the same text, after removing white space, `$`, `\text{}`, `\left` and the like;
- the same exact number (`quantities`): `1/2`, `\frac12`, `0.5`, `1,234`, `1 1/2`, `1e3`, `5 cm` for 5, `90^\circ` for 90; a
  decimal of at least 12 digits that a fraction rounds to (as a calculator prints 1/12), but not 33.3 for 100/3;
- an expression whose difference from the gold is exactly zero (`symbolic`): `\frac{x}{7}+\frac{2}{7}` for `\frac{x+2}{7}`,
  also an unevaluated sum or factorial (`2+2` for 4). A unit may follow it. `\log` without a base has base 10;
- tuples, intervals and matrices, item by item; sets and lists such as `1, 2`, `1 or 2` and `\pm 1`, in any order, unless
  they are continued (`1,2,\ldots`); inequalities, letters and words joined by `and` differ from those joined by `or`;
- the same part of the real line: `-2\le x\le 7` for `x\in[-2,7]`, `x<1` or `x>1` for `x\in\mathbb{R}\setminus\{1\}`;
- an equation or inequality with the same difference of sides, up to a constant factor (positive for an inequality).

The gold determines which kind of answer is expected. `x=5` equals 5 and vice versa, `f(x)=2x` equals `2x`. A solved gold
(`x=5`, `x>3`) requires a solved answer, not `2x=10`. If the gold is an interval, an inequality is wrong, because it may
repeat the question. Brackets never contain a number with thousands commas: `(1,234)` has two items. An answer with
words that are not units, or with anything else that is not fully understood, is wrong. So is an answer whose comparison
takes longer than `TIME_LIMIT_S`.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any

from tandem.platform.rewards import units
from tandem.platform.rewards.forms import (
    Relation,
    are_joined_otherwise,
    bracketed,
    is_function,
    matrix,
    members,
    named,
    region,
    relation,
)
from tandem.platform.rewards.latex import Reading, Unreadable, read
from tandem.platform.rewards.quantities import GROUPED, Quantity, equal_quantities, last_quantity, quantity
from tandem.platform.system.deadline import TimeIsUp, time_limit
from tandem.platform.system.search_path import users_set_aside

__all__ = ["Quantity", "equal", "equal_quantities", "last_box", "last_quantity", "normal", "number"]

TIME_LIMIT_S = 5.0  # of processor time per answer; reward.timeout_s bounds operations that this cannot interrupt
LONGEST = 2000  # characters; longer texts are only compared as text
MOST_ITEMS = 50  # of a list or matrix

_IN_RADIANS = re.compile(r"sin|cos|tan|cot|sec|csc|\\pi")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BARE_BOX = re.compile(r"(?:(?!\\[)\]])[^\s$])+")
_FRAC = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")
_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u22c5": "\\cdot ",
        "\u00f7": "\\div ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u2260": "\\ne ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2208": "\\in ",
        "\u00b1": "\\pm ",
        "\u211d": "\\mathbb{R}",
        "\u2205": "\\emptyset ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00b0": "^\\circ ",
    }
)
_LETTER_UNITS = {
    "m": "meters",
    "g": "grams",
    "s": "seconds",
    "h": "hours",
    "L": "liters",
    "N": "newtons",
    "J": "joules",
    "W": "watts",
    "V": "volts",
    "A": "amperes",
    "K": "kelvins",
}
_LETTER_UNIT = re.compile(r"(?<=[0-9})])((?: |\\[,;: ]|~)*)\\(?:text|mathrm|mbox) ?\{[ ~]*([mgshLNJWVAK]) ?\}")
_MONEY = {"\\$": "dollars", "\u20ac": "euros", "\u00a3": "gbp", "\u00a5": "yen"}
_AMOUNT = re.compile(r"(\\\$|[\u20ac\u00a3\u00a5]) ?((?:[0-9][0-9,]*)?\.?[0-9]+)")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\", r"\\newrow "),
        (r"\u221a ?([0-9]+)", r"\\sqrt{\1}"),
        (r"\u221a", r"\\sqrt "),
        (r"(?<=[0-9])(?:\{,\}|,\\!)(?=[0-9]{3})", ""),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|limits)(?![A-Za-z])|\\!|\\?\$|\\[()]", ""),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r" ?\^ ?(?:\\circ|\{ ?\\circ ?\})| ?\\degree(?![A-Za-z])", r"\\degree "),
        (r"\{,\}", ","),
        (r"\\operatorname\*? ?\{([A-Za-z]+)\}", r"\\\1 "),
        (r"\\%|(?<=[0-9]) ?percent(?![A-Za-z])", "%"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\[lr]?vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:neq|ne)(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"([_^]) ?\{ ?([A-Za-z0-9]) ?\}(?![0-9])", r"\1\2"),
        (r"(?<=[0-9]), +(?=[0-9]{3})", ";"),  # a comma followed by a space separates two items
        (r"\\[cl]?dots(?![A-Za-z])|\.\.\.|\u2026", r"\\ldots "),
        (r"\s+", " "),
        (r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", ""),  # "1 1/2" must not become "11/2"
    )
]


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; None if there is no box or it is cut off."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if rest.startswith("{"):
        return _braced(rest)
    bare = _BARE_BOX.match(rest)
    return (bare.group().rstrip(".,;:") or None) if bare else None


def number(text: str) -> Quantity | None:
    """The number that the whole text represents, with its unit or per cent sign; None if it is not a number."""
    return quantity(normal(text))


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` equals the gold, by the rules at the top of this file. An empty answer never does."""
    right, text = plain(gold), plain(answer)
    if not text:
        return False
    if _comparable(right) == _comparable(text):
        return True
    if max(len(right), len(text)) > LONGEST:
        return False
    try:
        return _same_in_time(right, text)
    except _NotLoaded:
        with users_set_aside():
            import tandem.platform.rewards.symbolic  # noqa: F401  # takes half a second, which must not count in the time limit

    return _same_in_time(right, text)


def normal(text: str) -> str:
    """The text in normal form: notation without meaning is removed, `\\frac{a}{b}` becomes `(a)/(b)`."""
    return _comparable(plain(text))


def plain(text: str) -> str:
    """The text as LaTeX in normal form: notation without meaning is removed."""
    text = re.sub(r"\s+", " ", text.translate(_UNICODE))
    text = _LETTER_UNIT.sub(lambda match: f" {_LETTER_UNITS[match[2]]} ", text)  # an upright letter is not a variable
    text = _AMOUNT.sub(lambda match: f"{match[2]} {_MONEY[match[1]]} ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip().removesuffix(".")


def _comparable(text: str) -> str:
    text = _FRAC.sub(lambda m: f"({_ungrouped(m[1] or m[2])})/({_ungrouped(m[3] or m[4])})", text)
    return text.replace("\\{", "{").replace("\\}", "}")


def _ungrouped(text: str | None) -> str:
    """The text; a number loses its thousands commas, because it will be put in brackets."""
    return (text or "").replace(",", "") if re.fullmatch(rf"[-+]?{GROUPED}(?:\.[0-9]+)?", text or "") else text or ""


def _braced(text: str) -> str | None:
    depth, skip = 0, False
    for place, character in enumerate(text):
        if skip or character == "\\":
            skip = not skip  # an escaped brace is plain text
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[1:place].strip()
    return None


class _NotLoaded(Exception):
    """The comparison needs `symbolic`, which is not loaded; few answers need it."""


def _same_in_time(gold: str, answer: str) -> bool:
    try:
        with users_set_aside(), time_limit(TIME_LIMIT_S):
            return _same(gold, answer)
    except _NotLoaded:
        raise
    except (TimeIsUp, Exception):  # texts that cannot be compared are not proven equal
        return False


def _decided(question: str, *arguments: Any) -> bool:
    """The result of the function `question` of `symbolic`; False if sympy cannot decide."""
    symbolic = sys.modules.get("tandem.platform.rewards.symbolic")
    if symbolic is None:
        raise _NotLoaded
    try:
        return bool(getattr(symbolic, question)(*arguments))
    except Exception:  # sympy raises many kinds; undecided texts count as different
        return False


def _same(gold: str, answer: str) -> bool:
    """Whether two texts in the form of `plain` are the same answer."""
    if not gold or not answer:
        return False
    if _comparable(gold) == _comparable(answer):
        return True
    right, value = quantity(_comparable(gold)), quantity(_comparable(answer))
    if right is not None and value is not None:
        return equal_quantities(right, value)
    golds, answers = members(gold), members(answer)
    if golds is not None or answers is not None:
        if are_joined_otherwise(gold, answer):
            return _same_region(gold, answer)
        return _same_in_any_order(golds, answers) or _same_region(gold, answer)
    left, other = relation(gold), relation(answer)
    if left.signs or other.signs:
        return _same_relation(gold, answer, left, other)
    return _same_items(gold, answer)


def _same_in_any_order(golds: list[str] | None, answers: list[str] | None) -> bool:
    if golds is None or answers is None or len(golds) != len(answers) or len(golds) > MOST_ITEMS:
        return False
    names = {equation[0] for equation in map(named, map(relation, golds)) if equation}
    is_without_names = len(names) > 1 and not any(map(named, map(relation, answers)))  # 2,1 is not a=1, b=2
    if is_without_names or "\\ldots" in golds:
        return all(map(_same, golds, answers))
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if _same(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_items(gold: str, answer: str) -> bool:
    """Whether two tuples, intervals, matrices, unions of intervals or expressions are equal."""
    golds, answers = bracketed(gold), bracketed(answer)
    if golds and answers:
        is_alike = golds[0] == answers[0] and len(golds[1]) == len(answers[1]) <= MOST_ITEMS
        return is_alike and all(map(_same, golds[1], answers[1]))
    right, other = matrix(gold), matrix(answer)
    if right and other:
        shapes = [[len(row) for row in rows] for _, rows in (right, other)]
        cells = [[cell for row in rows for cell in row] for _, rows in (right, other)]
        is_alike = right[0] == other[0] and shapes[0] == shapes[1] and len(cells[0]) <= MOST_ITEMS
        return is_alike and all(map(_same, *cells))
    if golds or answers or right or other or "\\cup" in gold + answer or "\\mathbb" in gold + answer:
        return _same_region(gold, answer)
    return _same_value(gold, answer)


def _same_relation(gold: str, answer: str, left: Relation, other: Relation) -> bool:
    """Whether two texts are the same answer; at least one of them is a relation."""
    right, value = named(left), named(other)
    if right and value and _are_one_name(right[0], value[0]) and _same(right[1], value[1]):
        return True
    if not left.signs:
        return bool(value) and _same(gold, value[1]) if value else _same_region(gold, answer)
    if not other.signs:
        may_drop = right and (is_function(right[0]) or _is_constant(right[1]))
        return _same(right[1], answer) if right and may_drop else _same_region(gold, answer)
    if right and _is_constant(right[1]):
        return False  # a solved gold requires a solved answer
    if region(gold):
        return _same_region(gold, answer)
    return _same_sides(left, other)


def _are_one_name(gold: str, answer: str) -> bool:
    """Whether two names before `=` are equivalent: f(x) may be called y."""
    return gold == answer or any(is_function(left) and right == "y" for left, right in ((gold, answer), (answer, gold)))


def _is_constant(text: str) -> bool:
    """Whether the text has no variables: a number, a tuple or an interval."""
    group = bracketed(text)
    if group:
        return all(map(_is_constant, group[1]))
    if quantity(_comparable(text)):
        return True
    try:
        return not read(text).variables
    except Unreadable:
        return False


def _same_sides(gold: Relation, answer: Relation) -> bool:
    """Whether two equations or inequalities with two sides are equal up to a factor."""
    turned = {">": "<", "\\ge": "\\le"}
    sides, signs = [], []
    for statement in (gold, answer):
        if len(statement.sides) != 2 or statement.signs == ("\\in",):
            return False
        is_turned = statement.signs[0] in turned
        try:
            readings = [read(side) for side in statement.sides]
        except Unreadable:
            return False
        sides.append((readings[1], readings[0]) if is_turned else (readings[0], readings[1]))
        signs.append(turned.get(statement.signs[0], statement.signs[0]))
    if signs[0] != signs[1]:
        return False
    return _decided("same_equation", *sides, signs[0] in ("<", "\\le"))


def _same_region(gold: str, answer: str) -> bool:
    """Whether two texts describe the same part of the real line."""
    right, other = region(gold), region(answer)
    if right is None or other is None or (other.variable and right.variable not in (None, other.variable)):
        return False
    if other.is_inequality and right.variable is None:
        return False  # the inequality may repeat the question
    return _decided("same_set", right.members, other.members)


def _same_value(gold: str, answer: str) -> bool:
    """Whether two expressions, each with or without a unit, are equal."""
    for right, unit in _readings(gold):
        for reading, other_unit in _readings(answer):
            is_alike = right.variables == reading.variables and (not unit or not other_unit or unit == other_unit)
            if is_alike and _decided("same_value", right, reading):
                return True
    return False


def _readings(text: str) -> list[tuple[Reading, str]]:
    """(expression, unit) of the whole text, and of the text before its unit, if these can be read."""
    before, unit = units.split(text)
    whole = ""
    if unit == "degree" or text.endswith("\\degree"):
        before = before.removesuffix("\\degree")
        text, whole = before + "\\degree", "radian"
        unit = "" if _IN_RADIANS.search(before) else "degree"  # \sin 30 is not \sin 30\degree, nor \pi one of \pi\degree
    is_variable = len(text) - len(before) <= 2 and not before.endswith((")", "}"))  # x m is a product
    readings = []
    for part, name in ((text, whole), *([(before, unit)] if unit and not is_variable else [])):
        with suppress(Unreadable):
            readings.append((read(part), name))
    return readings
