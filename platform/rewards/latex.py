r"""Reads an expression in LaTeX and rewrites it explicitly, so it has exactly one reading and nothing is left out.

`2\sin^2 x` becomes `2\cdot (\sin(x))^{2}`: every product is explicit, every argument is in brackets, every decimal is a
fraction. The parser of latex2sympy reads `(2)(3)` as a mixed number and `7 cubed` as a product of letters, and evaluates
some powers while parsing; the explicit form avoids all of this. A text with other content (words, units, dots, relations,
lists) is refused. So is a text whose exact value would be long: sizes are bounded before anything is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

LONGEST_TEXT = 400  # characters
LONGEST_LITERAL = 40  # digits
DEEPEST = 12  # levels of brackets
LARGEST_BITS = 25_000  # of numerator plus denominator: enough for 1000!
MOST_TERMS = 200  # of the expanded expression

_GREEK = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi varphi chi
psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar
"""
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp"
GREEK, FUNCTIONS = frozenset(_GREEK.split()), frozenset(_FUNCTIONS.split())
_PRODUCTS = frozenset(["*", "\\cdot", "\\times", "/", "\\div"])
_WORD = re.compile("[A-Z](?: ?[A-Z])+|no")  # HTH is not HHT
_NAMES_IN_WORDS = FUNCTIONS | {"sqrt", "pi"}
_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>[0-9]*\.[0-9]*\\overline\{[0-9]+\})"
    r"|(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])|(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z.]))?)"
    r"|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<sign>[-+*/^_!(){}\[\]|]))\s*"
)


class Unreadable(ValueError):
    """A text that is not a supported expression."""


@dataclass(frozen=True)
class Reading:
    """An explicit expression with its variables in `<>`. Example: `2x` is `Reading("2\\\\cdot <x>", {"x"})`."""

    text: str
    variables: frozenset[str]


@dataclass(frozen=True)
class _Piece:
    text: str
    level: int  # precedence: 0 sum, 1 product, 2 fraction, power or function, 3 atom
    bits: int = 1  # upper bound on the bits of its exact value, if it is a constant
    terms: int = 1  # upper bound on the terms of its expansion
    constant: bool = True
    value: int | None = None  # value of a literal

    def inside(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"


def read(text: str) -> Reading:
    """Reads the whole text as one expression.

    Raises:
        Unreadable: the text is not a supported expression, or its exact value may be too long to compute.
    """
    if len(text) > LONGEST_TEXT:
        raise Unreadable("too long")
    if _WORD.fullmatch(text):
        raise Unreadable("the order of its letters may count")
    reader = _Reader(_tokens(text))
    piece = reader.sum()
    if reader.rest:
        raise Unreadable(f"{reader.rest[-1]!r} is left over")
    return Reading(piece.text, frozenset(re.findall("<(.*?)>", piece.text)))


def _tokens(text: str) -> list[str]:
    tokens, place, brackets = [], 0, 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if not match:
            raise Unreadable(f"{text[place]!r} is no part of an expression")
        word, sign = match["word"], match["sign"]
        brackets += (sign in ("(", "[")) - (sign in (")", "]"))
        if brackets and "," in match[0]:
            raise Unreadable("a comma in brackets separates items")
        if word and word not in _NAMES_IN_WORDS:
            if len(word) > 3:
                raise Unreadable(f"{word!r} is a word")
            tokens += list(word)
        else:
            tokens.append("\\" + word if word else match[0].strip())
        place = match.end()
    return tokens


class _Reader:
    """Recursive-descent parser. `rest` holds the remaining tokens in reverse order."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens[::-1]
        self.last = ""
        self.depth = 0
        self.bars = 0

    def peek(self) -> str:
        return self.rest[-1] if self.rest else ""

    def take(self, wanted: str = "") -> str:
        if not self.rest or (wanted and self.rest[-1] != wanted):
            raise Unreadable(f"{wanted or 'more'} is missing")
        self.last = self.rest.pop()
        return self.last

    def sum(self) -> _Piece:
        """A sum of terms with signs."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("too deep")
        sign = self.take() if self.peek() in ("+", "-") else ""
        first = self.product()
        parts, pieces = [f"-{first.inside(1)}" if sign == "-" else first.text], [first]
        while self.peek() in ("+", "-"):
            sign = self.take()
            pieces.append(self.product())
            parts.append(sign + pieces[-1].inside(1))
        self.depth -= 1
        if len(parts) > 1 or sign == "-":
            value = -first.value if len(parts) == 1 and first.value is not None else None
            return _combined("".join(parts), 0, pieces, sum(piece.terms for piece in pieces), value=value)
        return first

    def product(self) -> _Piece:
        """Products, with or without a sign between the factors, and quotients, from left to right."""
        left = self.power()
        while True:
            sign = self.take() if self.peek() in _PRODUCTS else ""
            is_number = self.last == "!" and self.peek()[:1].isdigit()  # 5!5!
            if not sign and not is_number and not self._begins_factor():
                return left
            right = self.signed() if sign else self.power()
            if sign in ("/", "\\div"):
                if self._begins_factor() and not (left.constant and right.constant):
                    raise Unreadable("a factor behind x/y may be of either")
                left = _fraction(left, right)
            else:
                text = f"{left.inside(1)}\\cdot {right.inside(2)}"
                left = _combined(text, 1, [left, right], left.terms * right.terms)

    def signed(self) -> _Piece:
        """A factor with an optional sign."""
        if self.peek() not in ("+", "-"):
            return self.power()
        sign, piece = self.take(), self.power()
        if sign == "+":
            return piece
        return _combined(f"-{piece.inside(1)}", 0, [piece], piece.terms, value=piece.value and -piece.value)

    def power(self) -> _Piece:
        """An atom followed by exponents, factorials or degrees."""
        piece = self.atom()
        while self.peek() in ("^", "!", "\\degree"):
            sign = self.take()
            if sign == "^":
                piece = _power(piece, self.exponent())
                if self.peek() == "^":
                    raise Unreadable("two exponents")
            elif sign == "!" and self.peek() != "!":
                piece = _factorial(piece)
            elif sign == "!":
                raise Unreadable("a double factorial")
            else:
                piece = _combined(f"\\frac{{{piece.inside(1)}\\cdot \\pi}}{{180}}", 2, [piece], piece.terms)
        return piece

    def exponent(self) -> _Piece:
        """The exponent after ^; without braces it includes all digits of a number."""
        if self.peek() in ("-", "+"):
            return self.signed()
        if self.peek() == "(":
            return self.atom()
        return _literal(self.take()) if self.peek()[:1].isdigit() else self.argument()

    def argument(self) -> _Piece:
        """The argument of a command: a group in braces, or one digit, letter or command."""
        token = self.take()
        if token == "{":
            piece = self.sum()
            self.take("}")
            return piece
        if token.isdigit() and len(token) > 1:
            self.rest.append(token[1:])
        if token.isdigit():
            return _literal(token[0])
        if token.isalpha() or token[1:] in GREEK or token == "\\pi":
            self.rest.append(token)
            return self.atom()
        raise Unreadable(f"{token!r} is no argument")

    def atom(self) -> _Piece:
        """A number, variable, constant, group, fraction, root or function."""
        token = self.take()
        if token[0] in "0123456789.":
            return self._mixed(_literal(token))
        if token in _BRACKETS:
            return self._group(token)
        if token in ("e", "i", "\\pi", "\\infty"):
            return _Piece(token, 3)
        if len(token) == 1 and token.isalpha():
            return self._variable(token)
        name = token[1:]
        if name in GREEK:
            return self._variable(name)
        if name in FUNCTIONS:
            return self._function(name)
        if token in _COMMANDS:
            return _COMMANDS[token](self)
        raise Unreadable(f"{token!r} is not read")

    def fraction(self) -> _Piece:
        """The arguments of \\frac."""
        return _fraction(self.argument(), self.argument())

    def root(self) -> _Piece:
        """The arguments of \\sqrt."""
        index = None
        if self.peek() == "[":
            self.take()
            index = self.sum()
            self.take("]")
        inner = self.atom() if self.peek() == "(" else self.argument()
        degree = f"[{index.text}]" if index else ""
        return _combined(f"\\sqrt{degree}{{{inner.text}}}", 2, [inner, *([index] if index else [])], 1)

    def binomial(self) -> _Piece:
        """The arguments of \\binom, expressed with factorials."""
        top, bottom = self.argument(), self.argument()
        if not top.constant or not bottom.constant:
            rest = _combined(f"{top.inside(1)}-{bottom.inside(1)}", 0, [top, bottom], top.terms + bottom.terms)
            below = [_factorial(bottom), _factorial(rest)]
            product = _combined("\\cdot ".join(piece.text for piece in below), 1, below, 1)
            return _fraction(_factorial(top), product)
        if top.value is None or bottom.value is None or not 0 <= bottom.value <= top.value <= 1000:
            raise Unreadable("a large binomial coefficient")
        return _literal(str(math.comb(top.value, bottom.value)), longest=LARGEST_BITS)

    def _begins_factor(self) -> bool:
        """Whether a factor follows without a sign. A number never does: `x 2` and `1 2` are ambiguous."""
        token = self.peek()
        if token == "|":
            return not self.bars
        return bool(token) and (
            token.isalpha()
            or token in ("(", "{", "\\pi", "\\lfloor", "\\lceil")
            or token[1:] in GREEK | FUNCTIONS
            or token in _COMMANDS
        )

    def _mixed(self, whole: _Piece) -> _Piece:
        r"""A number, or a mixed number if a numeric fraction follows: 1\frac{1}{2}."""
        if whole.value is None or self.peek() != "\\frac":
            return whole
        self.take()
        top, bottom = self.argument(), self.argument()
        fraction = _fraction(top, bottom)
        if top.value is None or bottom.value is None:  # 2\frac{x}{3} is a product
            return _combined(f"{whole.text}\\cdot {fraction.text}", 1, [whole, fraction], fraction.terms)
        if top.value < 0 or bottom.value <= 0:
            raise Unreadable("a number before a fraction that makes no mixed number")
        return _combined(f"{whole.text}+{fraction.text}", 0, [whole, fraction], 1)

    def _group(self, opening: str) -> _Piece:
        self.bars += opening == "|"
        bars, self.bars = (self.bars, 0) if opening != "|" else (0, self.bars)
        piece = self.sum()
        self.take(_BRACKETS[opening])
        self.bars = bars if opening != "|" else self.bars - 1
        if opening in "({":
            return piece
        text = f"|{piece.text}|" if opening == "|" else f"{opening} {piece.text} {_BRACKETS[opening]}"
        return _combined(text, 2, [piece], 1)

    def _variable(self, name: str) -> _Piece:
        if self.peek() == "_":
            self.take()
            index = self._index()
            if not re.fullmatch("[A-Za-z0-9]+", index):
                raise Unreadable(f"the index {index!r}")
            name = f"{name}_{index}"
        return _Piece(f"<{name}>", 3, constant=False)

    def _index(self) -> str:
        if self.peek() != "{":
            return self.take()
        self.take()
        index = ""
        while self.peek() not in ("}", ""):
            index += self.take()
        self.take("}")
        return index

    def _function(self, name: str) -> _Piece:
        base, power = None, None
        while self.peek() in ("^", "_"):
            if self.take() == "^":
                power = self.exponent()
            elif name == "log":
                base = self.argument()
            else:
                raise Unreadable(f"an index of {name}")
        argument = self._function_argument()
        if power is not None and power.value == -1:
            if name not in ("sin", "cos", "tan"):
                raise Unreadable(f"the inverse of {name}")
            name, power = "arc" + name, None
        index = f"_{{{base.text}}}" if base else "_{10}" if name in ("log", "lg") else ""
        text = f"\\{'log' if name == 'lg' else name}{index}({argument.text})"
        if name == "exp":
            text = f"e^{{{argument.text}}}"
        piece = _combined(text, 2, [argument, *([base] if base else [])], 1)
        return piece if power is None else _power(piece, power)

    def _function_argument(self) -> _Piece:
        """The argument of a function: brackets, or all factors without signs up to the next bracket or function."""
        if self.peek() in ("(", "{", "|"):
            argument = self.atom()
            if self.peek() in ("^", "!"):
                raise Unreadable("a power behind an argument may be of either")
            return argument
        argument = self.power()
        while self._begins_factor() and self.peek() not in ("(", "|") and self.peek()[1:] not in FUNCTIONS:
            right = self.power()
            text = f"{argument.inside(1)}\\cdot {right.inside(2)}"
            argument = _combined(text, 1, [argument, right], argument.terms * right.terms)
        return argument


_BRACKETS = {"(": ")", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_COMMANDS: dict[str, Callable[[_Reader], _Piece]] = {
    "\\frac": _Reader.fraction,
    "\\sqrt": _Reader.root,
    "\\binom": _Reader.binomial,
}


def _combined(text: str, level: int, parts: list[_Piece], terms: int, *, value: int | None = None) -> _Piece:
    """Combines pieces by sums, products or functions. Raises Unreadable if the result may be too large."""
    bits = sum(part.bits + 1 for part in parts)
    if bits > LARGEST_BITS or terms > MOST_TERMS:
        raise Unreadable("too large")
    return _Piece(text, level, bits, terms, all(part.constant for part in parts), value)


def _literal(token: str, longest: int = LONGEST_LITERAL) -> _Piece:
    token = token.replace(",", "")
    if len(token) > longest:
        raise Unreadable("a long number")
    mantissa, _, exponent = token.lower().partition("e") if "\\" not in token else (token, "", "")
    before, _, after = mantissa.partition(".")
    if not after and not exponent:
        value = int(before)
        return _Piece(str(value), 3, max(1, value.bit_length()), value=value)
    plain, _, repeating = after.partition("\\overline{")
    scale = 10 ** len(plain)
    number = Fraction(int((before + plain) or "0"), scale)
    if repeating:
        repeating = repeating.rstrip("}")
        number += Fraction(int(repeating), scale * (10 ** len(repeating) - 1))
    number *= Fraction(10) ** int(exponent or 0)
    bits = number.numerator.bit_length() + number.denominator.bit_length()
    return _Piece(f"\\frac{{{number.numerator}}}{{{number.denominator}}}", 2, bits)


def _fraction(top: _Piece, bottom: _Piece) -> _Piece:
    return _combined(f"\\frac{{{top.text}}}{{{bottom.text}}}", 2, [top, bottom], top.terms * bottom.terms)


def _power(base: _Piece, exponent: _Piece) -> _Piece:
    largest = abs(exponent.value) if exponent.value is not None else 2 ** min(exponent.bits, 64)
    bits = base.bits * (largest if exponent.constant else 1) + exponent.bits
    # Upper bound on the number of terms of a power of a sum.
    terms = math.comb(largest + base.terms - 1, base.terms - 1) if exponent.constant and largest < 1000 else 1
    if bits > LARGEST_BITS or terms > MOST_TERMS or (base.terms > 1 and exponent.constant and largest >= 1000):
        raise Unreadable("a large power")
    text = f"{base.inside(3)}^{{{exponent.text}}}"
    return _Piece(text, 2, bits, terms, base.constant and exponent.constant)


def _factorial(piece: _Piece) -> _Piece:
    largest = piece.value if piece.value is not None else 2 ** min(piece.bits, 64)
    if piece.constant and not 0 <= largest <= 1001:
        raise Unreadable("a large factorial")
    bits = largest * 10 if piece.constant else piece.bits + 1
    return _Piece(f"{piece.inside(3)}!", 2, bits, 1, piece.constant)
