"""Reads the records of a run, a checkpoint or a benchmark into types. Errors name file, line and field.

A type is a dataclass (the keys are its field names, or `key` in their metadata), `dict[str, T]`, `list[T]`, `T | None`,
`Any`, or one of str, int, float and bool. Keys that a dataclass does not have are ignored.
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
MAX_DEPTH = 64  # nested lists and objects; pickle and JSON writers fail a few hundred levels deeper
LARGEST_BITS = 10_000  # of a whole number; Python refuses to write more than 4300 digits
NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_Reader = Callable[[Any, int], Any]
"""(value, nesting depth) -> the value converted to its type."""


@dataclass(frozen=True)
class Unusable:
    """Placeholder for a value in a file that no record may contain.

    Example: `Unusable("has the key 'role' twice")`.
    """

    problem: str


class _Refused(Exception):
    """A value of a wrong type: the problem, and the keys that lead to the value, innermost first."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.keys = problem, list[str]()


def read_object(path: Path, kind: type[T], below: Path | None = None) -> T:
    """The object of a JSON file, as type `kind`.

    Raises:
        FileError: the file has another type, or cannot be read. FileNotFoundError: there is no such file.
    """
    return parsed(parse_json(read_text(path, below), str(path)), kind, str(path))


def read_objects(path: Path, kind: type[T], below: Path | None = None) -> Iterator[tuple[str, T]]:
    """Yields (place, value) for every line of a JSON Lines file. A truncated last line is ignored.

    Raises:
        FileError: a line has another type. FileNotFoundError: there is no such file.
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
    """Decodes a line.

    Raises:
        FileError: the line is not UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not valid UTF-8 (byte {error.start + 1} of the line)") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """Parses JSON. Values that must be refused become `Unusable`, so the error can name their field.

    Raises:
        FileError: the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if ", line " not in where and error.lineno > 1 else ""
        raise FileError(f"{where}{line}, column {error.colno}: not valid JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: not valid UTF-8 (byte {error.start + 1})") from None
    except RecursionError:
        raise FileError(f"{where}: lists and objects are nested more than {MAX_DEPTH} deep") from None


def parsed(value: Any, kind: type[T], where: str) -> T:
    """Converts a JSON or YAML value to type `kind`; `where` names the file and, where known, the line.

    Raises:
        FileError: the value has another type; names the field.
    """
    try:
        return cast(T, _reader(cast(Any, kind))(value, 0))
    except _Refused as refused:
        field = ".".join(reversed(refused.keys))
        raise FileError(f"{where}: {f'field {field!r} ' if field else ''}{refused.problem}") from None


def kind_of(value: Any) -> str:
    """The JSON type of a value, in words."""
    if value is None:
        return "nothing"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Unusable:
    """An object. JSON allows duplicate keys, but their meaning is ambiguous, so they are refused."""
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    names = [name for name, _ in pairs]
    return Unusable(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")


def _integer(text: str) -> int | Unusable:
    try:
        return int(text)
    except ValueError:  # Python refuses to read more than 4300 digits
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
        [read] = [_reader(argument) for argument in arguments if argument is not type(None)]
        return lambda value, depth: None if value is None else read(value, depth)
    if origin is list:
        return partial(_list, _reader(arguments[0]))
    if origin in (dict, Mapping):
        return partial(_dict, _reader(arguments[1]))
    plain: dict[Any, _Reader] = {str: partial(_plain, str), bool: partial(_plain, bool), int: _whole, float: _number}
    return plain[kind]


def _fields(kind: Any) -> list[tuple[str, str, bool, _Reader]]:
    """(name, key in the object, whether it is required, reader) of every field of a dataclass."""
    hints = get_type_hints(kind)
    return [
        (
            field.name,
            field.metadata.get("key", field.name),
            field.default is MISSING and field.default_factory is MISSING,
            _reader(hints[field.name]),
        )
        for field in fields(kind)
    ]


def _record(kind: Any, known: list[tuple[str, str, bool, _Reader]], value: Any, depth: int) -> Any:
    record = _checked(value, dict, "an object", depth)
    for _, key, is_required, _ in known:
        if is_required and key not in record:
            raise _Refused(f"lacks the field {key!r}")
    return kind(**{name: _at(key, read, record[key], depth) for name, key, _, read in known if key in record})


def _dict(read: _Reader, value: Any, depth: int) -> dict[str, Any]:
    record = _checked(value, dict, "an object", depth)
    for key in record:
        if not isinstance(key, str):
            raise _Refused(f"has the key {key!r}, which is not text")
    return {key: _at(key, read, item, depth) for key, item in record.items()}


def _list(read: _Reader, value: Any, depth: int) -> list[Any]:
    return [_at(str(place), read, item, depth) for place, item in enumerate(_checked(value, list, "a list", depth))]


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
        raise _Refused(f"has {value.bit_length()} bits; a whole number has at most 64")
    return value


def _number(value: Any, depth: int) -> int | float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is not int:
        raise _Refused(f"is {value}, which is not a number") if type(value) is float else _wrong(value, NAMES[float])
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
        raise _Refused(f"has lists and objects nested more than {MAX_DEPTH} deep")
    return value


def _wrong(value: Any, name: str) -> _Refused:
    return _Refused(value.problem if isinstance(value, Unusable) else f"is {kind_of(value)}, expected {name}")


def _at(key: str, read: _Reader, value: Any, depth: int) -> Any:
    try:
        return read(value, depth + 1)
    except _Refused as refused:
        refused.keys.append(key)
        raise
