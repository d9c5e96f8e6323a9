r"""Whether a text is the right answer: exact numbers and boxed LaTeX, without symbolic algebra.

What counts as equal to the reference answer, the gold:
- the same text, once white space, `$`, `\text{}`, `\left`, degree signs and the like are gone;
- the same exact number: `1/2`, `\frac{1}{2}`, `\frac12`, `0.5`, `.50`, `1,234`, `1 1/2`, `1e3`, `004`, unicode minus;
- a decimal of at least 12 digits that a fraction rounds to (what a calculator prints for 1/12); 33.3 is not 100/3;
- tuples and intervals item by item, sets in any order.

A percentage equals its decimal value only when the gold is a percentage. A unit word after the number is accepted
(`5 cm` or `5\%` for 5), unless the gold has another one. Equations, inequalities and expressions count only when the
texts agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Longer numbers, and exponents of more digits, count as no numbers: exact arithmetic on them would take forever.
LONGEST_NUMBER = 1000  # characters
LONGEST_EXPONENT = 3  # digits
CALCULATOR_DIGITS = 12

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_IN_TEXT = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?\\?\$?(?P<top>{_DECIMAL})(?:/(?P<bottom>{_INTEGER}))?(?P<percent> ?\\?%)?"
)
_QUANTITY = re.compile(
    rf"(?P<sign>[-+])?(?:(?P<whole>{_INTEGER})(?: |(?=\()))?"  # 1 1/2
    rf"\(?(?P<top>[-+]?{_DECIMAL})\)?(?:/\(?(?P<bottom>[-+]?{_DECIMAL})\)?)?"
    r"(?P<percent> ?%)?(?P<unit>(?: [A-Za-z]+){1,2}(?:\^\{?[23]\}?)?)?"
)
_NOT_UNITS = frozenset(
    ["hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "pi", "or", "and", "to"]
)
_ONE_LETTER_UNITS = frozenset("mgshL")

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BARE_BOX = re.compile(r"(?:(?!\\[)\]])[^\s$])+")
_FRAC = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\u2212", "-"),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:left|right)(?![A-Za-z])|\\!|\\?\$|\\[()]", ""),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\^ ?(?:\\circ|\{ ?\\circ ?\})|°", ""),
        (r"\{,\}", ","),
        (r"\\%", "%"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\s+", " "),
        (r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", ""),  # "1 1/2" must not become "11/2"
    )
]


@dataclass(frozen=True)
class Quantity:
    """A number as it was written. Example: `50%` is `Quantity(Fraction(50), percent=True)`."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    is_fraction: bool = False
    digits: int = 0  # significant digits of a decimal
    places: int = 0  # digits after its point


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


def last_quantity(text: str) -> Quantity | None:
    """The last number in a text, or None."""
    numbers = list(_IN_TEXT.finditer(text.replace("\u2212", "-")))
    return _quantity(numbers[-1]) if numbers else None


def quantity(text: str) -> Quantity | None:
    """The number that a whole text is, or None. Units and per cent signs are part of it."""
    return _normal_quantity(normal(text))


def equal_quantities(gold: Quantity, answer: Quantity) -> bool:
    """Whether two numbers are the same, by the rules at the top of this file."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    right, given = gold.value, answer.value
    if gold.percent:
        right, given = right / 100, given / 100 if answer.percent else given
    if right == given:
        return True
    rounds = gold.is_fraction and not answer.is_fraction and answer.digits >= CALCULATOR_DIGITS
    return rounds and abs(right - given) < Fraction(1, 10**answer.places)


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` is the gold, by the rules at the top of this file; an empty answer never is."""
    gold, answer = normal(gold), normal(answer)
    if not answer:
        return False
    if gold == answer:
        return True
    golds, answers = _items(gold), _items(answer)
    if golds is None or answers is None:
        return _equal_items(gold, answer)
    if golds[0] != answers[0] or len(golds[1]) != len(answers[1]):
        return False
    if golds[0] == "{}":
        return _equal_sets(golds[1], answers[1])
    return all(map(_equal_items, golds[1], answers[1]))


def normal(text: str) -> str:
    """The text without what does not change its meaning; `\\frac{a}{b}` becomes `(a)/(b)`."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _FRAC.sub(lambda m: f"({m[1] or m[2] or ''})/({m[3] or m[4] or ''})", text)
    return text.replace("\\{", "{").replace("\\}", "}").rstrip(".")


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


def _normal_quantity(text: str) -> Quantity | None:
    match = _QUANTITY.fullmatch(text)
    return _quantity(match) if match else None


def _quantity(match: re.Match[str]) -> Quantity | None:
    parts = match.groupdict()
    top, bottom, whole = parts["top"], parts["bottom"], parts.get("whole")
    unit = (parts.get("unit") or "").strip()
    if (whole and not bottom) or not _is_unit(unit):
        return None
    numbers = [_fraction(text) for text in (top, bottom or "1", whole or "0")]
    if None in numbers or numbers[1] == 0:
        return None
    value = numbers[0] / numbers[1] + numbers[2]  # type: ignore[operator]
    mantissa = re.split("[eE]", top.replace(",", ""))[0].lstrip("-+")
    return Quantity(
        value=-value if parts["sign"] == "-" else value,
        percent=bool(parts["percent"]),
        unit=unit,
        is_fraction=bool(bottom),
        digits=len(mantissa.replace(".", "").lstrip("0")),
        places=len(mantissa.partition(".")[2]),
    )


def _fraction(text: str) -> Fraction | None:
    exponent = re.search("[eE][-+]?([0-9]+)", text)
    if len(text) > LONGEST_NUMBER or (exponent and len(exponent[1]) > LONGEST_EXPONENT):
        return None
    return Fraction(text.replace(",", ""))


def _is_unit(text: str) -> bool:
    words = re.findall("[A-Za-z]+", text)
    return all(word not in _NOT_UNITS and (len(word) > 1 or word in _ONE_LETTER_UNITS) for word in words)


def _equal_items(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    right, given = _normal_quantity(gold), _normal_quantity(answer)
    return right is not None and given is not None and equal_quantities(right, given)


def _equal_sets(golds: list[str], answers: list[str]) -> bool:
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if _equal_items(gold, answer)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _items(text: str) -> tuple[str, list[str]] | None:
    """The outer brackets and the items of `(a,b)`, `[a,b)` or `{a,b}`; None for anything else."""
    if len(text) < 3 or text[0] not in "([{" or text[-1] not in ")]}":
        return None
    depth, items, start = 0, [], 1
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and place < len(text) - 1:
            return None  # (1)/(2)
        if (character == "," and depth == 1) or depth == 0:
            items.append(text[start:place])
            start = place + 1
    return (text[0] + text[-1], items) if depth == 0 and len(items) > 1 else None
