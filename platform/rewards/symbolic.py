r"""Decides by exact algebra with sympy whether two expressions are equal.

`latex` reads a text and bounds its size, the parser of latex2sympy converts it to sympy objects, and the difference must
become exactly zero. Numbers are never compared with a tolerance: decimals are fractions, and numeric values are used only
to show that two expressions differ. Undecidable cases count as different.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from tandem.platform.rewards.latex import Reading

LETTERS = "xyzuvwabcmnpqrst"  # letters that the parser treats as plain variables
_CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_POINTS = (sympy.Rational(37, 101), sympy.Rational(733, 211))
_SIGNIFICANT = sympy.Float("1e-8")


def same_value(gold: Reading, answer: Reading) -> bool:
    """Whether the difference of two expressions is exactly zero."""
    if gold.variables != answer.variables:
        return False
    left, right = _on_the_domain_of(_expression(gold), _expression(answer))
    return _is_same(left, right)


def same_equation(gold: tuple[Reading, Reading], answer: tuple[Reading, Reading], signed: bool) -> bool:
    """Whether left minus right is equal up to a constant factor, which must be positive if `signed`."""
    if gold[0].variables | gold[1].variables != answer[0].variables | answer[1].variables:
        return False
    names = tuple(sorted(gold[0].variables | gold[1].variables))
    right, other = (_parsed(first.text, names) - _parsed(second.text, names) for first, second in (gold, answer))
    if _is_zero(right) or _is_zero(other):
        return False
    factor = sympy.cancel(sympy.together(other / right))
    if factor.free_symbols:
        factor = sympy.simplify(factor)
    if factor.free_symbols or not factor.is_finite or factor.is_zero is not False:
        return False
    return bool(factor.is_positive) or not signed


def same_set(gold: Any, answer: Any) -> bool:
    """Whether two trees of `forms.Region` have the same members. ValueError if a tree is not a set of real numbers."""
    left, right = _set_of(gold), _set_of(answer)
    return bool(left == right or (left - right) | (right - left) == sympy.S.EmptySet)


def _set_of(region: Any) -> Any:
    """The set that the members of a `forms.Region` describe."""
    kind, *parts = region
    if kind == "interval":
        low, high = (_number(part) for part in parts[:2])
        if not low < high:
            raise ValueError(f"an interval from {low} to {high}")
        return sympy.Interval(low, high, *parts[2:])
    if kind == "points":
        return sympy.FiniteSet(*(_number(part) for part in parts))
    if kind == "reals":
        return sympy.S.Reals
    sets = [_set_of(part) for part in parts]
    if kind == "difference":
        return sets[0] - sets[1]
    return sympy.Union(*sets) if kind == "union" else sympy.Intersection(*sets)


def _number(reading: Reading) -> Any:
    if reading.variables:
        raise ValueError(f"{reading.text} is not a number")
    value = sympy.simplify(_expression(reading))
    if not value.is_extended_real:
        raise ValueError(f"{reading.text} is not real")
    return value


def _expression(reading: Reading) -> Any:
    return _parsed(reading.text, tuple(sorted(reading.variables)))


@lru_cache(maxsize=256)  # every answer of a group has the same gold
def _parsed(text: str, names: tuple[str, ...]) -> Any:
    """The expression, with real variables."""
    if len(names) > len(LETTERS):
        raise ValueError("too many variables")
    for name, letter in zip(names, LETTERS, strict=False):
        text = text.replace(f"<{name}>", letter)
    expression = latex2sympy(text, normalization_config=None, conversion_config=_CONVERSION)
    if not isinstance(expression, sympy.Expr):
        raise ValueError(f"{text} is not an expression")
    values = {symbol: sympy.Symbol(symbol.name, real=True) for symbol in expression.free_symbols}
    values[sympy.Symbol("i")] = sympy.I
    return expression.xreplace(values).replace(_is_odd_root, _real_root).doit()


def _is_odd_root(part: Any) -> bool:
    return bool(part.is_Pow and part.exp.is_Rational and part.exp.p == 1 and part.exp.q % 2 and part.base.is_negative)


def _real_root(part: Any) -> Any:
    """The real root: the cube root of -8 is -2 in an answer, not the complex root that sympy returns."""
    return -((-part.base) ** part.exp)


def _on_the_domain_of(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Both expressions, with every variable positive that is the argument of a logarithm or an even root in the gold."""
    inner = [part.args[0] for part in gold.atoms(sympy.log)]
    inner += [part.base for part in gold.atoms(sympy.Pow) if part.exp.is_Rational and part.exp.q % 2 == 0]
    values = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in inner if symbol.is_Symbol}
    return gold.subs(values), answer.subs(values)


def _is_same(left: Any, right: Any) -> bool:
    if left.has(sympy.nan, sympy.zoo) or right.has(sympy.nan, sympy.zoo):
        return False
    if left == right:
        return True
    if not (left.is_finite is not False and right.is_finite is not False):
        return False
    return not _differ_numerically(left, right) and _is_zero(left - right)


def _differ_numerically(left: Any, right: Any) -> bool:
    """Whether the values are far apart at all test points. Never used to conclude equality."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for point in _POINTS:
        at = {symbol: point + sympy.Rational(place, 13) for place, symbol in enumerate(symbols)}
        first, second = (sympy.N(side.subs(at), 20) for side in (left, right))
        if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
            return False
        if not abs(first - second) > _SIGNIFICANT * (1 + abs(first) + abs(second)):
            return False
    return True


def _is_zero(difference: Any) -> bool:
    """Whether one of sympy's exact transformations reduces the difference to zero."""
    if difference == 0:
        return True
    steps: tuple[Callable[[Any], Any], ...] = (
        sympy.expand,
        lambda value: sympy.expand(sympy.numer(sympy.together(value))),
        lambda value: sympy.expand(value.rewrite(sympy.exp)),
        sympy.trigsimp,
        sympy.radsimp,
        sympy.sqrtdenest,
        sympy.simplify,
        lambda value: sympy.simplify(sympy.expand_log(value)),
        _by_minimal_polynomial,
    )
    return any(_becomes_zero(difference, step) for step in steps)


def _becomes_zero(value: Any, step: Callable[[Any], Any]) -> bool:
    try:
        return step(value) is sympy.S.Zero
    except Exception:  # a transformation that does not support this expression
        return False


def _by_minimal_polynomial(value: Any) -> Any:
    """Zero if the value is an algebraic number whose minimal polynomial is that of zero."""
    if value.free_symbols or not value.is_algebraic:
        return value
    variable = sympy.Dummy()
    return sympy.S.Zero if sympy.minimal_polynomial(value, variable) == variable else value
