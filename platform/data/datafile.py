"""The records of .jsonl and .parquet files, as plain Python values. Equal rows give equal records in both formats."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from tandem.platform.system.files import FileError, open_regular, read_lines
from tandem.platform.system.readers import MAX_DEPTH, Unusable, decoded, kind_of, parse_json
from tandem.platform.system.text import nearest

LARGEST_WHOLE = 2**53  # floats represent every whole number up to this
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # name that pandas gives to the column of an unnamed index


DataError = FileError
"""A data set that cannot be used; the text names the file, the line or row, and the field."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, record) for every record. Places are "FILE, line 3" or "FILE, row 3", counted from 1.

    Blank lines are skipped. Values are text, numbers, true, false, lists and objects. A whole number is an int, even if
    written as 7.0: in parquet, all numbers of a column are floats if one of them is, or with pandas if one is missing. Null
    fields of nested objects are left out at any depth, because parquet adds such a field wherever another row has a value
    for it. Null fields of the record itself are kept.

    Raises:
        DataError: the file, a line, or a value cannot be used.
    """
    reader = READERS.get(path.suffix.lower())
    _check_file(path, reader is not None)
    assert reader is not None
    for where, record in reader(path):
        if not isinstance(record, dict):
            problem = record.problem if isinstance(record, Unusable) else f"expected an object, got {kind_of(record)}"
            raise DataError(f"{where}: {problem}")
        yield where, {_checked_key(where, key): _field(where, key, value) for key, value in record.items()}


class _Refused(Exception):
    """A value that cannot be used. The text gives its place within the field and the problem."""


def _check_file(path: Path, is_known: bool) -> None:
    try:
        if path.is_dir():
            raise DataError(f"{path}: this is a folder; data is read from one file")
        if not path.exists():
            raise DataError(f"{path}: no such file{_neighbour(path)}")
        os.close(open_regular(path))  # refuses a pipe, which would block
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not is_known:
        raise DataError(f"{path}: unknown file type {path.suffix!r}; data is read from {' or '.join(READERS)}")


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent} either"
    names = [item.name for item in path.parent.iterdir() if item.suffix in READERS]
    close = nearest(path.name, names)
    return f"; did you mean {path.parent / close}?" if close else ""


# Reading


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for where, line in read_lines(path):
        text = decoded(line, where)
        if text.strip():
            yield where, parse_json(text, where)


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            table = file.read()
        names = [name for name in table.column_names if not PANDAS_INDEX.fullmatch(name)]
    except Exception as error:  # from the file system, from Arrow, or for names that are not text
        raise DataError(f"{path}: not a readable parquet file ({str(error).strip() or type(error).__name__})") from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: two columns are called {twice[0]!r}; give one of them another name")
    columns = [_column(path, name, table.column(name)) for name in names]
    for number in range(table.num_rows):
        yield f"{path}, row {number + 1}", {name: column[number] for name, column in zip(names, columns, strict=True)}


def _column(path: Path, name: str, column: Any) -> list[Any]:
    """The values of a column. pyarrow does not report which value it cannot convert, so search for it."""
    narrow = _narrow(column.type)
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
    except Exception:
        for number, value in enumerate(column, start=1):
            try:
                value.as_py(maps_as_pydicts="strict")
            except Exception as error:
                text = str(error.args[0] if error.args else error)
                raise DataError(f"{path}, row {number}: field {name!r} cannot be read: {text}") from error
        raise
    return [narrow(value) for value in values] if narrow else values


def _narrow(arrow: Any) -> Callable[[Any], Any] | None:
    """A function that rounds 16- and 32-bit floats to their shortest decimal (0.10000000149 to 0.1).

    None for columns without such floats.
    """
    from pyarrow import BaseExtensionType, types

    if isinstance(arrow, BaseExtensionType):
        return None
    if types.is_float16(arrow) or types.is_float32(arrow):
        return partial(_shortest, "e" if types.is_float16(arrow) else "f")
    if types.is_struct(arrow):
        fields = {field.name: change for field in arrow if (change := _narrow(field.type))}
        return partial(_in_object, fields) if fields else None
    if types.is_map(arrow):
        change = _narrow(arrow.item_type)
        return partial(_in_map, change) if change else None
    if not hasattr(arrow, "value_type"):
        return None
    change = _narrow(arrow.value_type)
    if types.is_dictionary(arrow):
        return change
    return partial(_in_list, change) if change else None


def _shortest(form: str, value: float | None) -> float | None:
    """The number with the fewest digits that rounds to the same 16- or 32-bit float."""
    if value is None or not math.isfinite(value):
        return value
    stored = struct.pack(form, value)
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        try:
            if struct.pack(form, shorter) == stored:
                return shorter
        except OverflowError:  # rounded up past the largest float
            continue
    return value


def _in_object(changes: Mapping[str, Callable[[Any], Any]], value: dict[str, Any] | None) -> dict[str, Any] | None:
    return value and value | {name: change(value[name]) for name, change in changes.items()}


def _in_map(change: Callable[[Any], Any], value: dict[Any, Any] | None) -> dict[Any, Any] | None:
    return value and {key: change(item) for key, item in value.items()}


def _in_list(change: Callable[[Any], Any], value: list[Any] | None) -> list[Any] | None:
    return value and [change(item) for item in value]


READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


# Values


def _checked_key(where: str, key: str) -> str:
    try:
        _check_text(key, "")
    except _Refused as refused:
        raise DataError(f"{where}: the name of field {key!r}{refused}") from None
    return key


def _field(where: str, key: str, value: Any) -> Any:
    try:
        return _plain(value, "", 1)
    except _Refused as refused:
        raise DataError(f"{where}: field {key!r}{refused}") from None


def _plain(value: Any, at: str, depth: int) -> Any:
    """A value as a JSON reader would return it; `at` is its place within the field."""
    if isinstance(value, str):
        if not value.isascii():
            _check_text(value, at)
        return value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _Refused(f"{_place(at)} is {value}, which is not a number; leave it out, or write null")
        return int(value) if value.is_integer() and abs(value) <= LARGEST_WHOLE else value
    if not isinstance(value, dict | list | tuple):
        return _converted(value, at)
    if depth > MAX_DEPTH:
        raise _Refused(f" has lists and objects nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        named = {_key(key, at): item for key, item in value.items() if item is not None}
        return {key: _plain(item, f"{at}[{key!r}]", depth + 1) for key, item in named.items()}
    return [_plain(item, f"{at}[{number}]", depth + 1) for number, item in enumerate(value)]


def _converted(value: Any, at: str) -> Any:
    """Converts parquet types that JSON lacks, if they have an obvious JSON form."""
    if isinstance(value, Unusable):
        raise _Refused(f"{_place(at)} {value.problem}")
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _Refused(f"{_place(at)} is bytes that are not UTF-8 text; leave it out, or store text") from None
    if isinstance(value, Decimal):
        if value.as_tuple().exponent == 0:
            return int(value)
        if Decimal(repr(float(value))) == value:
            return _plain(float(value), at, 1)
        raise _Refused(f"{_place(at)} is the decimal {value}, with more digits than a number keeps; store it as text")
    raise _Refused(
        f"{_place(at)} is of type {type(value).__name__}, which JSON does not support; leave it out, or store text"
    )


def _key(key: Any, at: str) -> str:
    if isinstance(key, dict | list | tuple):
        raise _Refused(f"{_place(at)} has the key {key!r}, which is not text")
    text = key if isinstance(key, str) else str(_plain(key, at, 1))  # JSON writes numeric keys as text
    if not text.isascii():
        _check_text(text, at)
    return text


def _check_text(text: str, at: str) -> None:
    """Refuses half a surrogate pair. JSON can write it as \\ud800, but tokenizers and files cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise _Refused(
            f"{_place(at)} has half a surrogate pair ({code}) as character {error.start + 1}, which is not text; "
            "replace it, or leave the row out"
        ) from None


def _place(at: str) -> str:
    return f" at {at}" if at else ""
