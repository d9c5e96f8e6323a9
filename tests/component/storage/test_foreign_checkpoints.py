"""Checkpoints from untrusted sources: no reader trusts their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_checkpoints import save

from tandem.launch import export
from tandem.launch.storage.checkpoint import CheckpointError
from tandem.launch.storage.checkpoints import Checkpoints, open_newest
from tandem.launch.storage.manifest import parse
from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import FileError

NAMES = (
    *("model/../../x", "model//x", "../x", "/x", "//x", "model/./x", ".", "..", "", "/", "model/", "model/..", "a\\..\\x"),
    *("..\\x", "C:x", "C:/x", "model/x\0y", "model/ x", "model/x ", "model/\nx", "model/\u202ex", "file:///x", "x" * 5000),
)


def tampered(folder: Path, name: str) -> str:
    """A checkpoint whose manifest names one more file, with the correct size and hash of that file."""
    place = Path(save(Checkpoints(str(folder), keep=2), 1))
    manifest = json.loads((place / "manifest.json").read_text())
    content = b"planted"
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for target in (place / "x", folder / "x", folder.parent / "x"):
        target.write_bytes(content)
    (place / "manifest.json").write_text(json.dumps(manifest))
    return str(place)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Every reader refuses such a name: resuming, exporting and finding the newest checkpoint."""
    place = tampered(tmp_path / "own", name)
    before = sorted(tmp_path.rglob("*"))
    for read in (
        lambda: Checkpoints(place.rpartition("/")[0], keep=2).find(place, print),
        lambda: Checkpoints(place.rpartition("/")[0], keep=2).find("auto", print),
        lambda: open_newest(place),
        lambda: export.export(place, tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="which is not a path below its folder"):
            read()  # type: ignore[no-untyped-call]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["model/config.json", "model", "actor", "driver.json"])
def test_links_are_not_followed(tmp_path: Path, what: str) -> None:
    place = Path(save(Checkpoints(str(tmp_path / "own"), keep=2), 1))
    (place / what).rename(tmp_path / "elsewhere")
    (place / what).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"is a link, which is not followed"):
        open_newest(str(place))


GOOD: dict[str, Any] = {"format": 1, "step": 3, "score": None, "settings": {}, "files": {"a": {"bytes": 1, "sha256": "0"}}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "3"}, "field 'step' is text, expected a whole number"),
        ({"step": True}, "field 'step' is true or false"),
        ({"step": -1}, "field 'step' is -1"),
        ({"step": 1.5}, "field 'step' is a number, expected a whole number"),
        ({"score": "best"}, "field 'score' is text, expected a number"),
        ({"settings": []}, "field 'settings' is a list, expected an object"),
        ({"files": None}, "field 'files' is nothing"),
        ({"files": {"a": 3}}, r"field 'files\.a' is a number, expected an object"),
        ({"files": {"a": {"bytes": "1", "sha256": "0"}}}, r"field 'files\.a\.bytes' is text"),
        ({"files": {"a": {"bytes": 1}}}, r"field 'files\.a' lacks the field 'sha256'"),
        ({"format": 2}, "has format 2, this version reads 1"),
        ({"format": None}, "has format None"),
    ],
)
def test_a_manifest_of_another_shape_is_told_with_its_field(changes: dict[str, Any], said: str) -> None:
    assert parse(json.dumps(GOOD).encode(), "m").step == 3
    with pytest.raises(ConfigError, match=f"^m.*{said}"):
        parse(json.dumps({**GOOD, **changes}).encode(), "m")


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": 1'])
def test_what_is_no_manifest_is_told(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^m"):
        parse(content, "m")


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff"])
def test_other_files_of_another_shape_are_told(tmp_path: Path, content: bytes) -> None:
    place = Path(save(Checkpoints(str(tmp_path / "own"), keep=2), 1))
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "driver.json").write_bytes(content)
    manifest["files"]["driver.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"driver\.json(: is|, column 2: not valid JSON|: not valid UTF-8)"):
        open_newest(str(place)).driver()


PLACES = ("checkpoints", "step-000001", "manifest.json", "driver.json", "model", "model/config.json", "actor/facts.json")
COMMANDS: dict[str, Callable[[Path], Any]] = {
    "resume by path": lambda place: store(place).find(str(place), print),
    "resume": lambda place: store(place).find("auto", print),
    "export by path": lambda place: exported(f"{place}"),
    "export": lambda place: exported(f"{place.parent}"),
}


def store(place: Path) -> Checkpoints:
    return Checkpoints(str(place.parent), keep=2)


def exported(path: str) -> None:
    if export.main([f"checkpoint={path}", f"to={path}-out"]):
        raise ConfigError("")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder", "nowhere"])
@pytest.mark.parametrize("what", PLACES)
def test_only_what_a_run_writes_is_read(
    tmp_path: Path, what: str, kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe, link or device in place of a checkpoint's file or folder is not read, and no reader waits for it."""
    place = Path(save(Checkpoints(str(tmp_path / "run" / "checkpoints"), keep=2), 1))
    path = {"checkpoints": place.parent, "step-000001": place}.get(what, place / what)
    path.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "link": tmp_path / "elsewhere"}.get(kind, tmp_path / "nothing"))
    try:
        found = COMMANDS[command](place)
    except ConfigError:
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said
    else:  # no checkpoint was found
        assert found is None
        assert what in ("checkpoints", "step-000001")
        assert kind != "link"
    assert not list(tmp_path.glob("**/*-out"))


def test_what_a_link_leads_to_is_not_removed(tmp_path: Path) -> None:
    """A link is not followed when old checkpoints or incomplete drafts are removed."""
    other = Path(save(Checkpoints(str(tmp_path / "other"), keep=1), 1))
    own = Checkpoints(str(tmp_path / "own"), keep=1)
    save(own, 2)
    (tmp_path / "own" / "step-000001").symlink_to(other)
    (tmp_path / "own" / ".x.part").symlink_to(other)
    before = sorted(other.rglob("*"))
    save(own, 3)
    assert sorted(other.rglob("*")) == before
    (tmp_path / "file").write_text("kept")
    (tmp_path / "own" / "step-000003" / "suspect.json").symlink_to(tmp_path / "file")
    with pytest.raises(FileError, match=r"suspect\.json is a link"):
        own.distrust(3, "why")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("content", [b"{}", b'{"model.dtype": 3}', b"[" * 100, b"\0" * 8, b""])
def test_files_with_the_right_hash_and_another_content_are_told(tmp_path: Path, content: bytes) -> None:
    place = Path(save(Checkpoints(str(tmp_path / "own"), keep=2), 1))
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["settings"]["model.dtype"] = "float32"
    for name in ("model/config.json", "actor/00000.safetensors"):
        (place / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (place / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises((ConfigError, CheckpointError)):
            export.export(str(place), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"00000\.safetensors holds no tensors"):
        list(open_newest(str(place)).parts("actor"))
