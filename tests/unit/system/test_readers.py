"""Typed readers: for any file content, a reader returns the type or an error with file, line and field."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.platform.system import files
from tandem.platform.system.files import (
    FileError,
    confined,
    open_regular,
    own_folder,
    read_bytes,
    read_lines,
    read_text,
    write_text,
)
from tandem.platform.system.readers import parse_json, parsed, read_object, read_objects


@dataclass(frozen=True)
class Inner:
    number: float


@dataclass(frozen=True)
class Outer:
    name: str
    count: int | None
    inners: list[Inner]
    by_name: dict[str, float | None] = field(default_factory=dict)
    is_on: bool = False
    free: Any = None
    slashed: float = field(default=0.0, metadata={"key": "a/b"})


GOOD = {"name": "n", "count": None, "inners": [{"number": 1}], "a/b": 0.5, "unknown": 3}


def test_a_record_of_its_type() -> None:
    assert parsed(GOOD, Outer, "f") == Outer("n", None, [Inner(1)], slashed=0.5)
    assert parsed({"x": [{"y": None}]}, dict[str, Any], "f") == {"x": [{"y": None}]}
    assert parsed([1, 2.5], list[float], "f") == [1, 2.5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": 3}, "field 'name' is a number, expected text"),
        ({"name": None}, "field 'name' is nothing, expected text"),
        ({"count": True}, "field 'count' is true or false, expected a whole number"),
        ({"count": 1.0}, "field 'count' is a number, expected a whole number"),
        ({"count": 2**63}, "field 'count' has 64 bits"),
        ({"inners": {}}, "field 'inners' is an object, expected a list"),
        ({"inners": [{"number": 1}, {}]}, r"field 'inners\.1' lacks the field 'number'"),
        ({"inners": [{"number": math.nan}]}, r"field 'inners\.0\.number' is nan, which is not a number"),
        ({"inners": [{"number": -math.inf}]}, r"field 'inners\.0\.number' is -inf"),
        ({"inners": [{"number": False}]}, r"field 'inners\.0\.number' is true or false"),
        ({"by_name": {"a": "1"}}, r"field 'by_name\.a' is text, expected a number"),
        ({"by_name": {3: 1.0}}, "field 'by_name' has the key 3, which is not text"),
        ({"by_name": {"a": 10**400}}, r"field 'by_name\.a' has 1329 bits, which is too large"),
        ({"is_on": 1}, "field 'is_on' is a number, expected true or false"),
        ({"free": b""}, "field 'free' is bytes, expected text"),
        ({"free": 2**10_001}, "field 'free' has a number of 10002 bits"),
    ],
)
def test_a_field_of_another_type_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FileError, match=f"^f, line 3: {said}"):
        parsed({**GOOD, **changes}, Outer, "f, line 3")


@pytest.mark.parametrize("depth", [100, 900])
def test_what_is_too_deep_is_refused(depth: int) -> None:
    with pytest.raises(FileError, match="nested more than 64 deep"):
        parsed(parse_json("[" * depth + "]" * depth, "f"), list[Any], "f")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "column 1: not valid JSON"),
        (b"{", "column 2: not valid JSON"),
        (b'{\n"a" 3}', "line 2, column 5: not valid JSON"),
        (b"[]", "is a list, expected an object"),
        (b"3", "is a number, expected an object"),
        (b"null", "is nothing, expected an object"),
        (b'{"a": "\xff"}', "line 1: not valid UTF-8"),
        (b'{}\n\n"\xff"', "line 3: not valid UTF-8"),
        (b"[" * 100_000, "more than 64 deep"),
        (b'{"a":' * 100_000, "more than 64 deep"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "field 'a' has a number of 5000 digits"),
        (b'{"a": NaN}', "field 'a' is nan"),
        (b'{"a": 1e999}', "field 'a' is inf"),
    ],
)
def test_what_is_no_object_is_told_with_its_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=rf"^{path}[:,] .*{said}"):
        read_object(path, dict[str, float])


def test_only_the_last_line_may_be_cut_off(tmp_path: Path) -> None:
    path, good = tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\n'
    for tail in (b"", b'{"a', b'{"a": "\xc3', b"\0\0\0\0"):
        path.write_bytes(good + tail)
        found = list(read_objects(path, dict[str, int]))
        assert found == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"a": 2})]
    for tail in (b'{"a\n', b"\xff\n", b"3\n", b"null", b'{"a": "x"}'):
        path.write_bytes(good + tail)
        with pytest.raises(FileError, match=r"a\.jsonl, line 4[:,]"):
            list(read_objects(path, dict[str, int]))


# Files


def make(kind: str, path: Path) -> None:
    """Makes something that is not a regular file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(path.name)
        os.chdir(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """Other kinds of files are refused at once; in particular, reading does not wait for the writer of a pipe."""
    path = tmp_path / "x"
    make(kind, path)
    for use in (
        lambda: read_bytes(path),
        lambda: list(read_lines(path)),
        lambda: open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        lambda: open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        with pytest.raises(FileError, match=f"{path} is a {kind}, expected a file"):
            use()  # type: ignore[no-untyped-call]


def test_files_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of a gigabyte is refused, both as a whole file and as a single line."""
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(FileError, match=f"has {2**30} bytes; at most"):
        read_text(path)
    monkeypatch.setattr(files, "LONGEST_LINE", 2**16)
    with pytest.raises(FileError, match=f"line 1: longer than {2**16} bytes"):
        list(read_lines(path))


def test_links_below_a_folder_are_not_followed(tmp_path: Path) -> None:
    """Links are followed if they are the folder itself or a path that the user names, but not inside the folder."""
    (tmp_path / "own" / "sub").mkdir(parents=True)
    (tmp_path / "own" / "sub" / "x").write_text("x")
    (tmp_path / "run").symlink_to(tmp_path / "own")
    run = tmp_path / "run"
    assert read_text(run / "sub" / "x", below=run) == "x"
    (run / "to").symlink_to("sub")
    (run / "file").symlink_to("sub/x")
    (run / "nowhere").symlink_to("nothing")
    for name in ("to/x", "file", "nowhere"):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
            with pytest.raises(FileError, match="is a link, which is not followed"):
                open_regular(run / name, flags, below=run)
    assert not (run / "nothing").exists()
    assert read_text(run / "file") == "x"
    with pytest.raises(FileError, match="to is a link"):
        own_folder(run / "to", below=run)
    with pytest.raises(FileError, match="x is not a folder"):
        own_folder(run / "sub" / "x", below=run)


@pytest.mark.parametrize("planted", ["x", "x.part"])
def test_writing_replaces_a_link(tmp_path: Path, planted: str) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / planted).symlink_to(target)
    write_text(tmp_path / "x", "new")
    assert (target.read_text(), (tmp_path / "x").read_text()) == ("kept", "new")
    assert not (tmp_path / "x").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "x"]


def test_names_that_cannot_be_paths(tmp_path: Path) -> None:
    for path in (tmp_path / ("long" * 100), tmp_path / "file" / "below", Path("a\0b")):
        (tmp_path / "file").write_text("")
        with pytest.raises(FileError, match="cannot be read"):
            read_bytes(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nothing")
    for name in ("..", "/x", "a/../b", "a\\b", "C:x", "a\nb", "a\udcff", "", " a", "x" * 5000):
        with pytest.raises(FileError, match="which is not a path below its folder"):
            confined(name, "it")
    assert confined("a/b.c", "it") == "a/b.c"
