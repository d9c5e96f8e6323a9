"""Records of a run, a checkpoint or a benchmark, parsed into types where they are read; errors name file, line and field.

A type is a dataclass (its fields are the object's, or what `key` in their metadata says), `dict[str, T]`, `list[T]`,
`T | None`, `Any`, or one of str, int, float and bool. Fields that a dataclass does not have are passed over.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tandem.platform.system.files import FileError, read_lines, read_text

T = TypeVar("T")
MAX_DEPTH = 64  # lists and objects within each other; pickle and JSON writers give up a few hundred further down
LARGEST_BITS = 10_000  # of a whole number; Python writes none of more than 4300 digits
NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_Reader = Callable[[Any, int], Any]
"""(value, how deep it stands) -> the value of its type."""


@dataclass(frozen=True)
class Unusable:
    """Stands for a value that a file has and that no record can have.

    Example: `Unusable("has the key 'role' twice")`.
    """

    problem: str


class _Refused(Exception):
    """A value of another type: what is wrong, and the keys that lead to it, the last one first."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.keys = problem, list[str]()


def read_object(path: Path, kind: type[T], below: Path | None = None) -> T:
    """The object of a JSON file.

    Raises:
        FileError: it is none of this type, or cannot be read. FileNotFoundError: there is none.
    """
    return parsed(parse_json(read_text(path, below), str(path)), kind, str(path))


def read_objects(path: Path, kind: type[T], below: Path | None = None) -> Iterator[tuple[str, T]]:
    """Every line of a file of JSON lines with its place; a last line that was cut off is none.

    Raises:
        FileError: a line is none of this type. FileNotFoundError: there is no file.
    """
    for where, line in read_lines(path, below):
        try:
            value = parse_json(decoded(line, where), where)
        except FileError:
            if not line.endswith(b"\n"):
                return
            raise
        yield where, parsed(value, kind, where)


def decoded(line: bytes, where: str) -> str:
    """A line as text.

    Raises:
        FileError: it is no UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not valid UTF-8 (byte {error.start + 1} of the line)") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """The value that JSON stands for, with `Unusable` for what must be refused where it stands.

    Raises:
        FileError: it is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if ", line " not in where and error.lineno > 1 else ""
        raise FileError(f"{where}{line}, column {error.colno}: not valid JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not valid UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise FileError(f"{where}: lists and objects are more than {MAX_DEPTH} deep") from None


def parsed(value: Any, kind: type[T], where: str) -> T:
    """A value of JSON or YAML as one of this type; `where` names the file, and the line.

    Raises:
        FileError: it is of another; names the field.
    """
    try:
        return cast(T, _reader(cast(Any, kind))(value, 0))
    except _Refused as refused:
        field = ".".join(reversed(refused.keys))
        raise FileError(f"{where}: {f'field {field!r} ' if field else ''}{refused.problem}") from None


def kind_of(value: Any) -> str:
    """What JSON calls a value."""
    if value is None:
        return "nothing"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Unusable:
    """An object; JSON allows a key twice, and which of the two is meant cannot be told."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    return Unusable(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")


def _integer(text: str) -> int | Unusable:
    try:
        return int(text)
    except ValueError:  # Python reads no number of more than 4300 digits
        return Unusable(f"has a number of {len(text)} digits; give it as text")


# By type


@cache
def _reader(kind: Any) -> _Reader:
    if kind is Any:
        return _any
    if is_dataclass(kind):
        return partial(_record, kind, _fields(kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        [own] = [_reader(one) for one in arguments if one is not type(None)]
        return lambda value, depth: None if value is None else own(value, depth)
    if origin is list:
        return partial(_list, _reader(arguments[0]))
    if origin in (dict, Mapping):
        return partial(_dict, _reader(arguments[1]))
    plain: dict[Any, _Reader] = {str: partial(_plain, str), bool: partial(_plain, bool), int: _whole, float: _number}
    return plain[kind]


def _fields(kind: Any) -> list[tuple[str, str, bool, _Reader]]:
    """Of a dataclass: name, key in the object, whether it must be there, how it is read."""
    hints = get_type_hints(kind)
    return [
        (
            one.name,
            one.metadata.get("key", one.name),
            one.default is MISSING and one.default_factory is MISSING,
            _reader(hints[one.name]),
        )
        for one in fields(kind)
    ]


def _record(kind: Any, known: list[tuple[str, str, bool, _Reader]], value: Any, depth: int) -> Any:
    found = _checked(value, dict, "an object", depth)
    for _, key, is_needed, _ in known:
        if is_needed and key not in found:
            raise _Refused(f"lacks the field {key!r}")
    return kind(**{name: _at(key, read, found[key], depth) for name, key, _, read in known if key in found})


def _dict(read: _Reader, value: Any, depth: int) -> dict[str, Any]:
    found = _checked(value, dict, "an object", depth)
    for key in found:
        if not isinstance(key, str):
            raise _Refused(f"has the key {key!r}, which is no text")
    return {key: _at(key, read, one, depth) for key, one in found.items()}


def _list(read: _Reader, value: Any, depth: int) -> list[Any]:
    return [_at(str(place), read, one, depth) for place, one in enumerate(_checked(value, list, "a list", depth))]


def _any(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        return _dict(_any, value, depth)
    if isinstance(value, list):
        return _list(_any, value, depth)
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise _Refused(f"has a number of {value.bit_length()} bits")
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    return _checked(value, str, "text, a number, a list or an object", depth)


def _plain(kind: type, value: Any, depth: int) -> Any:
    return _checked(value, kind, NAMES[kind], depth)


def _whole(value: Any, depth: int) -> int:
    if type(value) is not int:
        raise _wrong(value, NAMES[int])
    if not -(2**63) <= value < 2**63:
        raise _Refused(f"has {value.bit_length()} bits; a whole number has 64 at most")
    return value


def _number(value: Any, depth: int) -> int | float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is not int:
        raise _Refused(f"is {value}, which is no number") if type(value) is float else _wrong(value, NAMES[float])
    if abs(value) < 2**63:
        return value
    try:
        return float(value)  # 1e30 may be written without its exponent
    except OverflowError:
        raise _Refused(f"has {value.bit_length()} bits, which is too large a number") from None


def _checked(value: Any, kind: type, name: str, depth: int) -> Any:
    if not isinstance(value, kind):
        raise _wrong(value, name)
    if depth > MAX_DEPTH:
        raise _Refused(f"has lists and objects that are more than {MAX_DEPTH} deep")
    return value


def _wrong(value: Any, name: str) -> _Refused:
    return _Refused(value.problem if isinstance(value, Unusable) else f"is {kind_of(value)}, expected {name}")


def _at(key: str, read: _Reader, value: Any, depth: int) -> Any:
    try:
        return read(value, depth + 1)
    except _Refused as refused:
        refused.keys.append(key)
        raise
