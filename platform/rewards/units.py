"""The units that may follow a number, by their names and symbols.

A word is a unit only if it is in `TABLE` or `COUNTED`: `5 cm`, `5 square feet`, `5 m/s^2`, `5 miles per hour`, `5 apples`.
Any other word may be part of the value (`5 factorial`, `5 squared`, `3 dozen`) and does not count as a unit. Different
names of a unit are equal (`cm`, `centimetres`); different units are never converted (`5 m` is not `500 cm`).
"""

from __future__ import annotations

import re

TABLE = """
mm millimeter millimetre | cm centimeter centimetre | dm decimeter decimetre | m meter metre mtr | km kilometer kilometre
um micrometer micrometre micron | nm nanometer nanometre
inch in inches | foot ft feet | yard yd yds | mile mi | furlong | fathom | league | light-year lightyear
mg milligram | g gram gm gms | kg kilogram kgs | tonne ton | oz ounce | lb pound lbs | stone
ms millisecond | s second sec secs | min minute mins | h hour hr hrs | day | week wk wks | month | year yr yrs | decade
century centuries | am | pm
ml milliliter millilitre mL | cl centiliter centilitre | L liter litre | gallon gal gals | quart | pint | cup
tablespoon tbsp | teaspoon tsp | cc | acre | hectare ha
mph | kmh kph kmph | knot | rpm
dollar usd buck | cent | euro eur | penny pennies pence | nickel | dime | rupee rs inr | yen jpy | yuan rmb cny | peso
franc | pound-sterling gbp
degree deg degs | radian rad rads | celsius | fahrenheit | kelvin | arcminute | arcsecond
joule | kj kilojoule kJ | calorie cal cals | kcal | watt | kw kilowatt kW | megawatt MW | kwh kWh
newton | pascal Pa | kpa kPa | atm atmosphere | volt | ampere amp | ohm | coulomb | farad | tesla
hertz Hz hz | khz kHz | mhz MHz | ghz GHz | mol mole | bit | byte | kb kilobyte KB | mb megabyte MB | gb gigabyte GB
pixel | mmHg | dB decibel | unit
"""

COUNTED = """
apple orange banana pear peach egg cookie cake candy sandwich pizza loaf bottle can jar bag box basket bucket packet carton
book page word letter chapter pencil pen card ticket stamp coin toy ball marble balloon bead bean sticker crayon notebook
person people man men woman women child children boy girl student teacher pupil friend member player worker employee
customer guest passenger visitor family team class classroom school house room table chair car bus truck bike bicycle
train plane boat ship seat tire wheel tree flower plant seed rose dog cat cow horse sheep pig goat chicken duck bird fish
rabbit animal way outcome arrangement combination permutation path route possibility subset handshake game match
trip lap step stair floor shirt sock shoe hat dress vote token chip brick tile block stick rope piece slice serving meal
song movie photo picture gift present question problem side edge face vertex vertices diagonal triangle solution integer
number digit term element object item point revolution rotation
"""

_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SUPERSCRIPTS = {"\u00b2": "^2", "\u00b3": "^3"}
_NAME = r"[A-Za-z]+(?:-[a-z]+)?"
_PART = re.compile(rf"({_NAME})\.?(?:\^\{{?(-?[1-4])\}}?)?")
LONGEST = 60  # characters


def _plurals(name: str) -> set[str]:
    ending = "es" if name.endswith(("s", "x", "ch", "sh")) else "s"
    return {name, name + ending, name[:-1] + "ies"} if name.endswith("y") else {name, name + ending}


def _names() -> dict[str, str]:
    """Maps every word for a unit to the unit's first name."""
    names: dict[str, str] = {}
    for group in re.split(r"[|\n]", TABLE):
        for name in group.split():
            for form in _plurals(name) if len(name) > 3 else {name}:
                names[form] = group.split()[0]
    for name in COUNTED.split():
        names |= {form: name for form in _plurals(name) if form not in names}
    return names


NAMES = _names()
ONE_LETTER = frozenset("mgshL")


def split(text: str) -> tuple[str, str]:
    """(the text before its final unit, that unit in canonical spelling); the unit is empty if there is none.

    Examples: `5 square feet` gives `("5", "foot^2")`; `5 squared` gives `("5 squared", "")`.
    """
    for sign, power in _SUPERSCRIPTS.items():
        text = text.replace(sign, power)
    tail = text[-LONGEST:]
    for word in re.finditer(r"(?<![A-Za-z\\^_{/-])[A-Za-z]+", tail):
        before, unit = text[: len(text) - len(tail) + word.start()], canonical(tail[word.start() :])
        is_apart = before.endswith(" ") or len(word[0]) > 1 or " " in unit  # 5m may be a product; 5cm and 5m/s may not
        if unit and before.strip() and is_apart:
            return before.strip(), unit
    return text, ""


def canonical(text: str) -> str:
    """Canonical spelling of a unit: `cm^2` for `square centimeters`, `m s^-2` for `m/s^2`; empty if the text is no unit."""
    powers: dict[str, int] = {}
    for place, side in enumerate(re.split(r" ?/ ?| per ", text.strip())):
        factors = _factors(side.strip())
        if factors is None:
            return ""
        for name, power in factors:
            powers[name] = powers.get(name, 0) + (-power if place else power)
    return " ".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()) if power)


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Names and powers of the factors in `kg m^2` or `square feet`; None if any word of the text is no unit."""
    factors, times = [], 1
    for part in re.split(r"\\cdot ?|[ *]", text):
        match = _PART.fullmatch(part)
        if not match:
            return None
        name = _name(match[1])
        if times == 1 and not name and match[1] in _POWER_WORDS:
            times = _POWER_WORDS[match[1]]
        elif name:
            factors.append((name, times * int(match[2] or 1)))
            times = 1
        else:
            return None
    return factors if times == 1 else None


def _name(word: str) -> str:
    """The first name of the unit that a word denotes; empty if the word is no unit."""
    if len(word) == 1:
        return word if word in ONE_LETTER else ""
    return NAMES.get(word) or NAMES.get(word[0].lower() + word[1:], "")
