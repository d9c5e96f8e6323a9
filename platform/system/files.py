"""Opening and writing files that others may have put there: only regular files, and of no more than a limit.

Below a run's folder (`below`) no link is followed, whatever it leads to; the folder itself may be one, as where outputs are
kept on another disk. What users name themselves, as data, may be a link.
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
LARGEST_FILE = 256 * MIB  # that is read whole
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
    """A file that cannot be used; the text names it, and the line and the field where there are such."""


def open_regular(path: Path, flags: int = os.O_RDONLY, below: Path | None = None) -> int:
    """A descriptor of a regular file, which nothing is waited for.

    Raises:
        FileError: it is something else. OSError: it cannot be opened.
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
    """Refuses a path with a link in it below `folder`.

    Raises:
        FileError: names the link.
    """
    place = folder
    for part in path.relative_to(folder).parts:
        place = place / part
        if os.path.islink(place):
            raise FileError(f"{place} is a link, which is not followed")


def confined(name: str, where: str) -> str:
    """A name that stays below the folder it is joined to.

    Raises:
        FileError: it is absolute, goes up, or means something else to some file system.
    """
    parts = name.split("/")
    if (
        any(part in ("", ".", "..") or part != part.strip() for part in parts)
        or any(character in name for character in "\\:\0")
        or not name.isprintable()
        or len(name) > LONGEST_NAME
    ):
        raise FileError(f"{where} names {name[:200]!r}, which is no path below its folder")
    return name


# Reading


@contextmanager
def _opened(path: Path, below: Path | None) -> Iterator[BinaryIO]:
    """A file to read; what keeps it from being read is told with its name."""
    try:
        with open(open_regular(path, below=below), "rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # a name with a zero in it
        if isinstance(error, FileError):
            raise
        raise FileError(f"{str(path)!r}: cannot be read ({error})") from error


def read_bytes(path: Path, below: Path | None = None, limit: int = LARGEST_FILE) -> bytes:
    """The content of a file.

    Raises:
        FileError: it is larger, or cannot be read. FileNotFoundError: there is none.
    """
    with _opened(path, below) as file:
        if (size := os.fstat(file.fileno()).st_size) <= limit:
            return file.read()
    raise FileError(f"{path} has {size} bytes; at most {limit} are read")


def read_text(path: Path, below: Path | None = None, limit: int = LARGEST_FILE) -> str:
    """The same as text.

    Raises:
        FileError: as `read_bytes`, or it is no UTF-8. FileNotFoundError.
    """
    content = read_bytes(path, below, limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FileError(f"{path}, line {line}: not valid UTF-8") from None


def read_lines(path: Path, below: Path | None = None) -> Iterator[tuple[str, bytes]]:
    """Every line that is not blank with its place, "FILE, line 3"; only the last may end without a newline.

    Raises:
        FileError: a line is longer than LONGEST_LINE, or the file cannot be read. FileNotFoundError: there is none.
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
    """Writes JSON whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_text(path: Path, content: str) -> None:
    """Writes text whole or not at all; in the place of a link comes the file itself."""
    draft = path.with_name(path.name + ".part")
    draft.unlink(missing_ok=True)  # of a process that was killed, or planted
    # Half a surrogate pair, which no file takes, becomes \udXXX; in JSON that means the same.
    with draft.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(content)
    os.replace(draft, path)


def own_folder(path: Path, below: Path) -> Path:
    """A folder below a run's folder, made if need be.

    Raises:
        FileError: a link or a file is in its place.
    """
    refuse_links(path, below)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise FileError(f"{path} is not a folder") from error
    return path
