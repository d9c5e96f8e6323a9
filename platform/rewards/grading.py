r"""Whether a text is the right answer: first as text and exact number, then by its form and exact algebra.

What counts as equal to the reference answer, the gold:
- the same text, once white space, `$`, `\text{}`, `\left` and the like are gone;
- the same exact number (`quantities`): `1/2`, `\frac12`, `0.5`, `1,234`, `1 1/2`, `1e3`, `5 cm` for 5, `90^\circ` for 90; a
  decimal of at least 12 digits that a fraction rounds to (what a calculator prints for 1/12), but not 33.3 for 100/3;
- an expression whose difference from the gold is exactly zero (`symbolic`): `\frac{x}{7}+\frac{2}{7}` for `\frac{x+2}{7}`,
  also a sum or factorial that is not worked out (`2+2` for 4). A unit may stand behind it. `\log` without a base is to 10;
- tuples, intervals and matrices item by item; sets, and lists as `1, 2`, `1 or 2` and `\pm 1`, in any order, unless they
  go on (`1,2,\ldots`); inequalities, letters and words joined by `and` are not the same ones joined by `or`;
- the same part of the real line: `-2\le x\le 7` for `x\in[-2,7]`, `x<1` or `x>1` for `x\in\mathbb{R}\setminus\{1\}`;
- an equation or inequality whose sides differ by the same, up to a constant factor (positive in an inequality).

The gold decides what kind of answer is expected. `x=5` is as good as 5 and the other way round, `f(x)=2x` as `2x`; but a
gold that is solved (`x=5`, `x>3`) wants a solved answer, not `2x=10`, and a gold that is an interval wants no inequality,
which may be that of the question. Brackets never hold a number with thousands commas: `(1,234)` has two items. Words that
are no units, and anything else that is not understood to the last sign, make an answer wrong. So does a comparison that
takes over `TIME_LIMIT_S`.
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

TIME_LIMIT_S = 5.0  # of processor time, for one answer; reward.timeout_s bounds what this cannot interrupt
LONGEST = 2000  # characters that are compared by form
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
        (r"(?<=[0-9]), +(?=[0-9]{3})", ";"),  # with a space, the comma separates two items
        (r"\\[cl]?dots(?![A-Za-z])|\.\.\.|\u2026", r"\\ldots "),
        (r"\s+", " "),
        (r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", ""),  # "1 1/2" must not become "11/2"
    )
]


def last_box(text: str) -> str | None:
    r"""What the last `\boxed{...}`, `\fbox{...}` or `\boxed 7` holds; None if there is none or it is cut off."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    rest = text[boxes[-1].end() :]
    if rest.startswith("{"):
        return _braced(rest)
    bare = _BARE_BOX.match(rest)
    return (bare.group().rstrip(".,;:") or None) if bare else None


def number(text: str) -> Quantity | None:
    """The number that a whole text is, or None. Units and per cent signs are part of it."""
    return quantity(normal(text))


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` is the gold, by the rules at the top of this file; an empty answer never is."""
    right, given = plain(gold), plain(answer)
    if not given:
        return False
    if _comparable(right) == _comparable(given):
        return True
    if max(len(right), len(given)) > LONGEST:
        return False
    try:
        return _same_in_time(right, given)
    except _NotLoaded:
        with users_set_aside():
            import tandem.platform.rewards.symbolic  # noqa: F401  # half a second, of which the time limit must not take anything

    return _same_in_time(right, given)


def normal(text: str) -> str:
    """The text without what does not change its meaning; `\\frac{a}{b}` becomes `(a)/(b)`."""
    return _comparable(plain(text))


def plain(text: str) -> str:
    """The text without what does not change its meaning, as LaTeX."""
    text = re.sub(r"\s+", " ", text.translate(_UNICODE))
    text = _LETTER_UNIT.sub(lambda match: f" {_LETTER_UNITS[match[2]]} ", text)  # upright, a letter is no variable
    text = _AMOUNT.sub(lambda match: f"{match[2]} {_MONEY[match[1]]} ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip().removesuffix(".")


def _comparable(text: str) -> str:
    text = _FRAC.sub(lambda m: f"({_ungrouped(m[1] or m[2])})/({_ungrouped(m[3] or m[4])})", text)
    return text.replace("\\{", "{").replace("\\}", "}")


def _ungrouped(text: str | None) -> str:
    """The text; a number with thousands commas loses them, because brackets follow."""
    return (text or "").replace(",", "") if re.fullmatch(rf"[-+]?{GROUPED}(?:\.[0-9]+)?", text or "") else text or ""


def _braced(text: str) -> str | None:
    depth, skip = 0, False
    for place, character in enumerate(text):
        if skip or character == "\\":
            skip = not skip  # an escaped brace is text
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[1:place].strip()
    return None


class _NotLoaded(Exception):
    """The algebra is needed for this answer, as for few."""


def _same_in_time(gold: str, answer: str) -> bool:
    try:
        with users_set_aside(), time_limit(TIME_LIMIT_S):
            return _same(gold, answer)
    except _NotLoaded:
        raise
    except (TimeIsUp, Exception):  # what we cannot compare is not shown to be equal
        return False


def _decided(question: str, *arguments: Any) -> bool:
    """The answer of a function of `symbolic`; False if sympy cannot say."""
    symbolic = sys.modules.get("tandem.platform.rewards.symbolic")
    if symbolic is None:
        raise _NotLoaded
    try:
        return bool(getattr(symbolic, question)(*arguments))
    except Exception:  # sympy raises all kinds of them; what is not shown to be equal is different
        return False


def _same(gold: str, answer: str) -> bool:
    """Whether two texts in the form of `plain` are the same answer."""
    if not gold or not answer:
        return False
    if _comparable(gold) == _comparable(answer):
        return True
    right, given = quantity(_comparable(gold)), quantity(_comparable(answer))
    if right is not None and given is not None:
        return equal_quantities(right, given)
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
    names = {found[0] for found in map(named, map(relation, golds)) if found}
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
    """Whether two tuples, intervals or matrices, unions of intervals, or expressions are the same."""
    golds, answers = bracketed(gold), bracketed(answer)
    if golds and answers:
        is_alike = golds[0] == answers[0] and len(golds[1]) == len(answers[1]) <= MOST_ITEMS
        return is_alike and all(map(_same, golds[1], answers[1]))
    right, given = matrix(gold), matrix(answer)
    if right and given:
        shapes = [[len(row) for row in one[1]] for one in (right, given)]
        cells = [[cell for row in one[1] for cell in row] for one in (right, given)]
        is_alike = right[0] == given[0] and shapes[0] == shapes[1] and len(cells[0]) <= MOST_ITEMS
        return is_alike and all(map(_same, *cells))
    if golds or answers or right or given or "\\cup" in gold + answer or "\\mathbb" in gold + answer:
        return _same_region(gold, answer)
    return _same_value(gold, answer)


def _same_relation(gold: str, answer: str, left: Relation, other: Relation) -> bool:
    """Whether two texts of which at least one is a relation are the same answer."""
    right, given = named(left), named(other)
    if right and given and _are_one_name(right[0], given[0]) and _same(right[1], given[1]):
        return True
    if not left.signs:
        return bool(given) and _same(gold, given[1]) if given else _same_region(gold, answer)
    if not other.signs:
        may_drop = right and (is_function(right[0]) or _is_constant(right[1]))
        return _same(right[1], answer) if right and may_drop else _same_region(gold, answer)
    if right and _is_constant(right[1]):
        return False  # a solved gold wants a solved answer
    if region(gold):
        return _same_region(gold, answer)
    return _same_sides(left, other)


def _are_one_name(gold: str, answer: str) -> bool:
    """Whether two names before `=` mean the same: f(x) may be called y."""
    return gold == answer or any(is_function(one) and other == "y" for one, other in ((gold, answer), (answer, gold)))


def _is_constant(text: str) -> bool:
    """Whether the text has no variables: a number, a tuple or an interval."""
    found = bracketed(text)
    if found:
        return all(map(_is_constant, found[1]))
    if quantity(_comparable(text)):
        return True
    try:
        return not read(text).variables
    except Unreadable:
        return False


def _same_sides(gold: Relation, answer: Relation) -> bool:
    """Whether two equations or inequalities of two sides are the same up to a factor."""
    turned = {">": "<", "\\ge": "\\le"}
    sides, signs = [], []
    for one in (gold, answer):
        if len(one.sides) != 2 or one.signs == ("\\in",):
            return False
        is_turned = one.signs[0] in turned
        try:
            readings = [read(side) for side in one.sides]
        except Unreadable:
            return False
        sides.append((readings[1], readings[0]) if is_turned else (readings[0], readings[1]))
        signs.append(turned.get(one.signs[0], one.signs[0]))
    if signs[0] != signs[1]:
        return False
    return _decided("same_equation", *sides, signs[0] in ("<", "\\le"))


def _same_region(gold: str, answer: str) -> bool:
    """Whether two texts name the same part of the real line."""
    right, given = region(gold), region(answer)
    if right is None or given is None or (given.variable and right.variable not in (None, given.variable)):
        return False
    if given.is_inequality and right.variable is None:
        return False  # it may be the question's own
    return _decided("same_set", right.members, given.members)


def _same_value(gold: str, answer: str) -> bool:
    """Whether two expressions, each with a unit or not, are the same."""
    for right, unit in _readings(gold):
        for given, other in _readings(answer):
            is_alike = right.variables == given.variables and (not unit or not other or unit == other)
            if is_alike and _decided("same_value", right, given):
                return True
    return False


def _readings(text: str) -> list[tuple[Reading, str]]:
    """The expression that a text is, and the one before its unit with the unit, as far as they can be read."""
    before, unit = units.split(text)
    whole = ""
    if unit == "degree" or text.endswith("\\degree"):
        before = before.removesuffix("\\degree")
        text, whole = before + "\\degree", "radian"
        unit = "" if _IN_RADIANS.search(before) else "degree"  # \sin 30 is not \sin 30\degree, nor \pi one of \pi\degree
    is_variable = len(text) - len(before) <= 2 and not before.endswith((")", "}"))  # x m is a product
    found = []
    for part, name in ((text, whole), *([(before, unit)] if unit and not is_variable else [])):
        with suppress(Unreadable):
            found.append((read(part), name))
    return found
