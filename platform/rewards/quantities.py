r"""Numbers as people write them, exactly: `1/2`, `\frac{1}{2}`, `1,234`, `1 1/2`, `1e3`, `50\%`, `5 cm`, `90^\circ`.

A percentage equals its decimal value only if the gold is a percentage. A unit of `units` is accepted after the number,
unless the gold has a different unit. Commas between groups of three digits belong to a number, except in brackets:
`(1,234)` has two items.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tandem.platform.rewards import units

# Longer numbers and exponents do not count as numbers: exact arithmetic on them would take too long.
LONGEST_NUMBER = 1000  # characters
LONGEST_EXPONENT = 3  # digits
CALCULATOR_DIGITS = 12

GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])"
_INTEGER = rf"(?:{GROUPED}|[0-9]+)"
_EXPONENT = r"(?:[eE][-+]?[0-9]+)?"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+){_EXPONENT}"
_PLAIN = rf"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+){_EXPONENT}"
_IN_TEXT = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?\\?\$?(?P<top>{_DECIMAL})(?:/(?P<bottom>{_INTEGER}))?(?P<percent> ?\\?%)?"
)
_IN_BRACKETS = re.compile(rf"(?:[(\[]|(?<![A-Za-z]){{)\s*[-+]?{GROUPED}\s*\\?[)\]}}]")
_QUANTITY = re.compile(
    rf"(?P<sign>[-+])?(?:(?P<whole>{_INTEGER})(?: |(?=\()))?"  # 1 1/2
    rf"(?:\((?P<top_in>{_PLAIN})\)|(?P<top>[-+]?{_DECIMAL}))"
    rf"(?:/(?:\((?P<bottom_in>{_PLAIN})\)|(?P<bottom>[-+]?{_DECIMAL})))?"
    r"(?P<percent> ?%)?(?P<degrees>\\degree)? ?(?P<scale>(?<=degree )[CF])?"
)


@dataclass(frozen=True)
class Quantity:
    """A number as written. Example: `50%` is `Quantity(Fraction(50), percent=True)`."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    is_fraction: bool = False
    digits: int = 0  # significant digits of a decimal
    last_place: Fraction = Fraction(1)  # value of one unit in its last digit


def last_quantity(text: str) -> Quantity | None:
    """The last number in a running text, or None."""
    text = _IN_BRACKETS.sub(lambda match: match[0].replace(",", ", "), text.replace("\u2212", "-"))
    numbers = list(_IN_TEXT.finditer(text))
    return _quantity(numbers[-1], "") if numbers else None


def quantity(text: str) -> Quantity | None:
    """The number that the whole text represents, or None. The text must be in the form of `grading.normal`."""
    match, unit = _QUANTITY.fullmatch(text), ""
    if match is None:
        text, unit = units.split(text)
        match = _QUANTITY.fullmatch(text) if unit else None
    if match is None or (unit and (match["percent"] or match["degrees"])):
        return None
    degrees = f"degree {match['scale'] or ''}".strip() if match["degrees"] else ""
    return _quantity(match, unit or degrees)


def equal_quantities(gold: Quantity, answer: Quantity) -> bool:
    """Whether two numbers are equal: exactly, or if the gold rounds to the answer, a decimal of at least 12 digits."""
    if gold.unit and (answer.percent or answer.unit not in ("", gold.unit)):
        return False
    right, value = gold.value, answer.value
    if gold.percent:
        right, value = right / 100, value / 100 if answer.percent else value
    if right == value:
        return True
    if not gold.is_fraction or answer.is_fraction or answer.digits < CALCULATOR_DIGITS or right * value < 0:
        return False
    last_place = answer.last_place / 100 if gold.percent and answer.percent else answer.last_place
    return abs(right - value) < last_place


def _quantity(match: re.Match[str], unit: str) -> Quantity | None:
    parts = match.groupdict()
    top = parts["top"] or parts["top_in"]
    bottom, whole = parts["bottom"] or parts.get("bottom_in"), parts.get("whole")
    if whole and not bottom:
        return None
    numbers = [_fraction(text) for text in (top, bottom or "1", whole or "0")]
    if None in numbers or numbers[1] == 0:
        return None
    value = numbers[0] / numbers[1] + numbers[2]  # type: ignore[operator]
    mantissa, _, exponent = top.replace(",", "").lstrip("-+").lower().partition("e")
    decimals = mantissa.partition(".")[2]
    return Quantity(
        value=-value if parts["sign"] == "-" else value,
        percent=bool(parts["percent"]),
        unit=unit,
        is_fraction=bool(bottom),
        digits=len(mantissa.replace(".", "").lstrip("0")),
        last_place=Fraction(10) ** (int(exponent or 0) - len(decimals)),
    )


def _fraction(text: str) -> Fraction | None:
    exponent = re.search("[eE][-+]?([0-9]+)", text)
    if len(text) > LONGEST_NUMBER or (exponent and len(exponent[1]) > LONGEST_EXPONENT):
        return None
    return Fraction(text.replace(",", ""))
