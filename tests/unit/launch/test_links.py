"""Names and links that lead out of a run's folder: neither readers nor writers follow them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_broken_runs import READ, check_told
from test_broken_runs import folder as folder

from tandem.launch import report, runs
from tandem.launch.assembly.resume import checkpoints_of
from tandem.launch.assembly.run import make_folder
from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.validate import validate
from tandem.platform.records.recorder import Recorder
from tandem.platform.system.files import FileError

LINKS = ("file", "pipe", "device", "folder", "nowhere", "itself")


@pytest.mark.parametrize("name", [*READ, "samples"])
@pytest.mark.parametrize("to", LINKS)
def test_a_link_is_not_followed(folder: Path, name: str, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "a" / name
    path.rename(folder.parent / "file")
    (folder.parent / "folder").mkdir()
    os.mkfifo(folder.parent / "pipe")
    targets = {"device": "/dev/zero", "itself": path}
    path.symlink_to(targets.get(to, folder.parent / to))
    check_told(folder, name, capsys)


# Names


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../b", "../../x", "/etc", "a/b", "a/../b", "a\\b", "C:x", "a\0", "a\nb", "a\x1b[2J", "a\u202eb", ""],
)
def test_names_that_lead_elsewhere(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["show", name], ["compare", "b", name]):
        assert runs.main([*arguments, f"folder={folder / 'a'}"]) == 2
    config, _ = compose([])
    config.run.name = name
    with pytest.raises(ConfigError, match=r"run\.name=.* must be a valid folder name"):
        validate(config)
    assert "Traceback" not in capsys.readouterr().err


def test_names_that_are_too_long(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main(["show", "x" * 300, f"folder={folder}"]) == 2
    assert report.main(["x" * 300]) == 2
    config, _ = compose([f"run.name='{'é' * 101}'"])
    with pytest.raises(ConfigError, match=r"has 202 bytes\. Use at most 200"):
        validate(config)


# Writing


def test_the_runs_folder_itself_may_be_a_link(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").symlink_to(folder)
    (folder / "c").symlink_to(folder / "a")
    assert runs.main(["show", "c", f"folder={tmp_path / 'other'}"]) == 0
    assert report.main([str(folder / "c")]) == 0
    Recorder(folder / "c", 0.0, resumed_after=1).close("finished")


@pytest.mark.parametrize("name", ["report.html", "report.html.part"])
def test_a_report_replaces_a_link(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "target").write_text("kept")
    (folder / "a" / name).symlink_to(tmp_path / "target")
    assert report.main([str(folder / "a")]) == 0
    assert (tmp_path / "target").read_text() == "kept"
    assert (folder / "a" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("resumed_after", [None, 1])
@pytest.mark.parametrize("to", ["file", "pipe", "nowhere"])
def test_metrics_are_not_appended_to_a_link(folder: Path, tmp_path: Path, to: str, resumed_after: int | None) -> None:
    path = folder / "a" / "metrics.jsonl"
    path.rename(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    path.symlink_to(tmp_path / to)
    before = (tmp_path / "file").read_text()
    with pytest.raises(FileError, match=r"metrics\.jsonl is a link, which is not followed"):
        Recorder(folder / "a", 0.0, resumed_after)
    assert (tmp_path / "file").read_text() == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "run.json", "versions.json", "samples", "checkpoints"])
def test_a_run_writes_through_no_link(tmp_path: Path, name: str) -> None:
    """A run replaces files that are links, and refuses or skips folders that are links."""
    (tmp_path / "run").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("kept")
    is_folder = name in ("samples", "checkpoints")
    (tmp_path / "run" / name).symlink_to(tmp_path / "target" / ("" if is_folder else "file"))
    config, _ = compose(["run.name=run", f"run.dir={tmp_path}"])
    if name == "checkpoints":
        with pytest.raises(ConfigError, match="checkpoints is a link, which is not followed"):
            checkpoints_of(config)
        return
    notes: list[str] = []
    recorder = Recorder(make_folder(config, 0.0, checkpoints_of(config), None), 0.0, note=notes.append)
    recorder.samples(1, [{"prompt": "p"}])
    recorder.close("finished")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]
    assert (tmp_path / "target" / "file").read_text() == "kept"
    assert (tmp_path / "run" / name).is_symlink() == is_folder
    assert len(notes) == is_folder
