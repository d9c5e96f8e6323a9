"""The permissions of written files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.launch.assembly.folder import make_folder
from tandem.launch.assembly.resume import checkpoints_of
from tandem.launch.storage.sharing import follow_umask, shared_with
from tandem.platform.config.schema import Config


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def folder_of_a_run(tmp_path: Path, share: str) -> Path:
    config = Config()
    config.run.name, config.run.dir, config.run.share = "a", str(tmp_path), share
    with shared_with(share):
        return make_folder(config, 0.0, checkpoints_of(config), None)


@pytest.mark.parametrize(
    ("share", "of_folder", "of_file"), [("private", 0o700, 0o600), ("group", 0o750, 0o640), ("all", 0o755, 0o644)]
)
def test_a_run_is_shared_with_whom_it_says(tmp_path: Path, share: str, of_folder: int, of_file: int) -> None:
    before = os.umask(0o022)
    try:
        folder = folder_of_a_run(tmp_path, share)
        assert (mode(folder), mode(folder / "run.json"), mode(folder / "config.yaml")) == (of_folder, of_file, of_file)
        assert mode(tmp_path) == 0o700  # the folder of all runs is as it was
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_another_choice_holds_for_what_is_there(tmp_path: Path) -> None:
    folder_of_a_run(tmp_path, "private")
    samples = tmp_path / "a" / "samples"
    samples.mkdir(mode=0o700)
    (samples / "step-000001.jsonl").touch(mode=0o600)
    folder = folder_of_a_run(tmp_path, "group")
    assert (mode(folder), mode(samples), mode(samples / "step-000001.jsonl")) == (0o750, 0o750, 0o640)


def test_links_are_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch(mode=0o600)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(outside)
    with shared_with("all"):
        follow_umask(tmp_path / "in")
    assert mode(outside) == 0o600
    assert mode(tmp_path / "in") == 0o755
