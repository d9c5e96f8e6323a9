"""Reads and writes files that other users may have planted: only regular files, up to a size limit.

Below a run's folder (`below`) no link is followed, wherever it leads. The folder itself may be a link, for example to
another disk. Paths that users specify, such as data files, may be links.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tandem.platform.config.schema import ConfigError

MIB = 2**20
LARGEST_FILE = 256 * MIB  # largest file that is read at once
LONGEST_LINE = 64 * MIB
LONGEST_NAME = 4096  # characters of a path
KINDS = (
    (stat.S_ISLNK, "a link, which is not followed"),
    (stat.S_ISDIR, "a folder, expected a file"),
    (stat.S_ISFIFO, "a pipe, expected a file"),
    (stat.S_ISSOCK, "a socket, expected a file"),
    (stat.S_ISCHR, "a device, expected a file"),
    (stat.S_ISBLK, "a device, expected a file"),
)


class FileError(ConfigError):
    """A file that cannot be used; the text names the file and, where known, line and field."""


def open_regular(path: Path, flags: int = os.O_RDONLY, below: Path | None = None) -> int:
    """Opens a regular file without blocking and returns its descriptor.

    Raises:
        FileError: the path is not a regular file. OSError: the file cannot be opened.
    """
    follow = below is None
    if below is not None:
        refuse_links(path, below)
    if os.path.lexists(path):
        mode = os.stat(path, follow_symlinks=follow).st_mode
        if kind := next((words for is_kind, words in KINDS if is_kind(mode)), None):
            raise FileError(f"{path} is {kind}")
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), 0o666)


def refuse_links(path: Path, folder: Path) -> None:
    """Refuses a path that contains a link below `folder`.

    Raises:
        FileError: the path contains a link; names it.
    """
    place = folder
    for part in path.relative_to(folder).parts:
        place = place / part
        if os.path.islink(place):
            raise FileError(f"{place} is a link, which is not followed")


def confined(name: str, where: str) -> str:
    """Returns `name` if it stays below the folder it is joined to.

    Raises:
        FileError: the name is absolute, goes up, or has a different meaning on some file systems.
    """
    parts = name.split("/")
    if (
        any(part in ("", ".", "..") or part != part.strip() for part in parts)
        or any(character in name for character in "\\:\0")
        or not name.isprintable()
        or len(name) > LONGEST_NAME
    ):
        raise FileError(f"{where} names {name[:200]!r}, which is not a path below its folder")
    return name


# Reading


@contextmanager
def _opened(path: Path, below: Path | None) -> Iterator[BinaryIO]:
    """Opens a file for reading. Converts read errors to FileErrors that name the file."""
    try:
        with open(open_regular(path, below=below), "rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # a name with a null character
        if isinstance(error, FileError):
            raise
        raise FileError(f"{str(path)!r}: cannot be read ({error})") from error


def read_bytes(path: Path, below: Path | None = None, limit: int = LARGEST_FILE) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        FileError: the file is larger, or cannot be read. FileNotFoundError: there is no such file.
    """
    with _opened(path, below) as file:
        if (size := os.fstat(file.fileno()).st_size) <= limit:
            return file.read()
    raise FileError(f"{path} has {size} bytes; at most {limit} are read")


def read_text(path: Path, below: Path | None = None, limit: int = LARGEST_FILE) -> str:
    """The content of a UTF-8 file as text.

    Raises:
        FileError: as in `read_bytes`, or the file is not UTF-8. FileNotFoundError: there is no such file.
    """
    content = read_bytes(path, below, limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(f"{path}, line {line}: not valid UTF-8") from None


def read_lines(path: Path, below: Path | None = None) -> Iterator[tuple[str, bytes]]:
    """Yields (place, line) for every line that is not blank, with places such as "FILE, line 3".

    Only the last line may lack a newline.

    Raises:
        FileError: a line is longer than LONGEST_LINE, or the file cannot be read. FileNotFoundError: there is no such file.
    """
    with _opened(path, below) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if len(line) > LONGEST_LINE:
                raise FileError(f"{path}, line {number}: longer than {LONGEST_LINE} bytes")
            if line.strip():
                yield f"{path}, line {number}", line


# Writing


def write_json(path: Path, content: Any) -> None:
    """Writes JSON atomically: completely or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_text(path: Path, content: str) -> None:
    """Writes text atomically: completely or not at all. Replaces a link by a regular file."""
    draft = path.with_name(path.name + ".part")
    draft.unlink(missing_ok=True)  # left by a killed process, or planted
    # Files cannot hold half a surrogate pair. It is written as \udXXX, which has the same meaning in JSON.
    with draft.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(content)
    os.replace(draft, path)


def own_folder(path: Path, below: Path) -> Path:
    """Returns a folder below a run's folder, creating it if necessary.

    Raises:
        FileError: the path is a link or a file.
    """
    refuse_links(path, below)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise FileError(f"{path} is not a folder") from error
    return path
