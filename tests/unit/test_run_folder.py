"""The folder of a run: never one that holds results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.launch.folder import check_folder, claimed, make_folder
from tandem.launch.resume import checkpoints_of
from tandem.platform.config import Config, ConfigError
from tandem.platform.records import Recorder


def config(folder: Path) -> Config:
    result = Config()
    result.run.dir, result.run.name = str(folder), "a"
    return result


def folder_of(settings: Config) -> Path:
    check_folder(settings, checkpoints_of(settings), None)
    return make_folder(settings, 0.0)


def test_a_run_that_measured_something_or_goes_on_keeps_its_folder(tmp_path: Path) -> None:
    recorder = Recorder(folder_of(config(tmp_path)), 0.0)
    with pytest.raises(ConfigError, match="holds a run already"):
        folder_of(config(tmp_path))
    recorder.first_evaluation({"step": 0.0, "eval/held/greedy": 0.5})
    recorder.close("failed", "why")
    with pytest.raises(ConfigError, match="holds a run already"):
        folder_of(config(tmp_path))


def test_a_run_that_failed_before_it_measured_anything_may_be_tried_again(tmp_path: Path) -> None:
    Recorder(folder_of(config(tmp_path)), 0.0).close("failed", "data.train: no such file")
    again = folder_of(config(tmp_path))
    assert again == tmp_path / "a"
    assert not (again / "summary.json").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file: the run's folder cannot be written"):
        folder_of(config(tmp_path / "file"))


def test_one_process_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "a"):
        with (
            pytest.raises(ConfigError, match=r"another process trains into .*a\. Wait for it to end"),
            claimed(tmp_path / "a"),
        ):
            pass
        with claimed(tmp_path / "b"):
            pass
    with claimed(tmp_path / "a"):
        assert (tmp_path / "a").is_dir()
