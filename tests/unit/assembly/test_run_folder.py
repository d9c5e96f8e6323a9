"""The folder of a run: a folder with other results is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.launch.assembly.folder import make_folder
from tandem.launch.assembly.resume import checkpoints_of
from tandem.launch.storage.checkpoints import Checkpoints
from tandem.launch.storage.claim import claimed
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.records.recorder import Recorder


def config(folder: Path, **checkpoint: str) -> Config:
    result = Config()
    result.run.dir, result.run.name = str(folder), "a"
    for key, value in checkpoint.items():
        setattr(result.checkpoint, key, value)
    return result


class Role:
    """A trained role of one tensor."""

    def state_parts(self) -> Any:
        yield {"weights/0": torch.zeros(2)}

    def state_facts(self) -> list[dict[str, Any]]:
        return [{"updates": 1}]


def start(settings: Config, notes: list[str] | None = None) -> tuple[Path, Checkpoints]:
    """Starts a run as the command does; returns its folder and its checkpoints."""
    checkpoints = checkpoints_of(settings)
    found = checkpoints.find(settings.checkpoint.resume, lambda text: None)
    return make_folder(settings, 0.0, checkpoints, found, (notes if notes is not None else []).append), checkpoints


def save(checkpoints: Checkpoints, step: int) -> str:
    return checkpoints.save(step, {}, {"actor": Role()}, lambda folder: None, {}, None)  # type: ignore[dict-item]


def measure(folder: Path, status: str | None, step: int = 1) -> None:
    """Records one step of a run that ends with this status (None: it is killed)."""
    recorder = Recorder(folder, 0.0)
    recorder.step(step, {"step": float(step), "reward/mean": 0.5}, 1.0)
    if status:
        recorder.close(status, None)


@pytest.mark.parametrize("status", ["failed", "interrupted", None])
def test_an_attempt_without_a_checkpoint_is_set_aside(tmp_path: Path, status: str | None) -> None:
    """The same command, started again without a checkpoint, starts over and keeps the records of the first attempt."""
    for attempt in (1, 2):
        notes: list[str] = []
        folder, _ = start(config(tmp_path), notes)
        assert [path.name for path in folder.iterdir() if path.name.startswith(("metrics", "summary"))] == []
        assert len(notes) == attempt - 1
        measure(folder, status, step=attempt)
    start(config(tmp_path))
    for attempt in (1, 2):
        kept = folder / "attempts" / str(attempt)
        assert f'"step": {attempt}' in (kept / "metrics.jsonl").read_text()
        assert (kept / "config.yaml").exists()
        assert (kept / "summary.json").exists() == (status is not None)
    assert "attempts/1" in notes[0]


def test_a_run_that_failed_before_it_measured_anything_leaves_nothing_to_keep(tmp_path: Path) -> None:
    folder, _ = start(config(tmp_path))
    Recorder(folder, 0.0).close("failed", "data.train: no such file")
    again, _ = start(config(tmp_path))
    assert again == folder == tmp_path / "a"
    assert not (again / "summary.json").exists()
    assert not (again / "attempts").exists()


def test_a_finished_run_keeps_its_folder_even_without_checkpoints(tmp_path: Path) -> None:
    measure(start(config(tmp_path))[0], "finished")
    with pytest.raises(ConfigError, match=r"holds a finished run\. Set another run.name"):
        start(config(tmp_path))


def test_a_run_with_checkpoints_goes_on_or_is_refused(tmp_path: Path) -> None:
    folder, checkpoints = start(config(tmp_path))
    measure(folder, "failed")
    save(checkpoints, 1)
    start(config(tmp_path))
    with pytest.raises(ConfigError, match=r"holds a run already, and with checkpoint\.resume=never"):
        start(config(tmp_path, resume="never"))


def test_two_runs_of_one_name_do_not_go_on_from_each_other(tmp_path: Path) -> None:
    """Two runs with the same checkpoint.dir but different records do not resume from each other's checkpoints."""
    place = str(tmp_path / "shared")
    folder, checkpoints = start(config(tmp_path / "one", dir=place))
    measure(folder, "interrupted")
    path = save(checkpoints, 1)
    other = config(tmp_path / "two", dir=place)
    with pytest.raises(ConfigError, match=f"another run of this name, with its records in {folder}") as caught:
        start(other)
    other.run.name = "b"  # the advice
    start(other)
    branch = config(tmp_path / "three", dir=place, resume=path)
    branch.run.name = "c"
    start(branch)
    assert "Set another run.name; to branch off from them, set checkpoint.resume" in str(caught.value)


def test_a_run_that_goes_on_began_when_it_began(tmp_path: Path) -> None:
    """A resumed run keeps its start time; an attempt that was set aside does not count as the start."""

    def told() -> dict[str, Any]:
        return dict(json.loads((tmp_path / "a" / "run.json").read_text()))

    folder, _ = start(config(tmp_path))
    (folder / "run.json").write_text(json.dumps({**told(), "started_at": "2020-01-01T00:00:00+0000"}))
    measure(folder, "failed")
    _, checkpoints = start(config(tmp_path))
    first = told()
    assert not first["started_at"].startswith("2020")
    (folder / "run.json").write_text(json.dumps({**first, "started_at": "2021-01-01T00:00:00+0000"}))
    save(checkpoints, 1)
    start(config(tmp_path))
    assert told()["started_at"].startswith("2021")
    assert not told()["continued_at"].startswith("2021")


def test_a_run_that_lost_its_records_goes_on_in_the_same_place(tmp_path: Path) -> None:
    """This happens on a new node if only the checkpoints are on shared storage."""
    settings = config(tmp_path / "one", dir=str(tmp_path / "shared"))
    folder, checkpoints = start(settings)
    save(checkpoints, 1)
    shutil.rmtree(folder)
    _, again = start(settings)
    assert again.run == checkpoints.run


def test_a_run_whose_records_moved_goes_on(tmp_path: Path) -> None:
    folder, checkpoints = start(config(tmp_path / "one", dir=str(tmp_path / "shared")))
    measure(folder, "interrupted")
    save(checkpoints, 1)
    (tmp_path / "one").rename(tmp_path / "two")
    _, again = start(config(tmp_path / "two", dir=str(tmp_path / "shared")))
    assert again.run is not None
    assert checkpoints.run is not None
    assert again.run.id == checkpoints.run.id


def test_checkpoints_without_an_identity_are_gone_on_from(tmp_path: Path) -> None:
    folder, checkpoints = start(config(tmp_path))
    checkpoints.run = None
    save(checkpoints, 1)
    (folder / "run.json").unlink()
    _, again = start(config(tmp_path))
    assert again.run is not None


def test_a_run_can_keep_its_next_checkpoints_elsewhere(tmp_path: Path) -> None:
    """The advice for a full disk works: with both settings, the next checkpoints go to another place."""
    folder, checkpoints = start(config(tmp_path))
    measure(folder, "failed")
    path = save(checkpoints, 1)
    elsewhere = str(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"To resume it, set checkpoint.resume={path}"):
        start(config(tmp_path, dir=elsewhere))
    _, moved = start(config(tmp_path, dir=elsewhere, resume=path))
    assert moved.run == checkpoints.run
    save(moved, 2)
    assert not (folder / "attempts").exists()
    found = checkpoints_of(config(tmp_path, dir=elsewhere)).find("auto", lambda text: None)
    assert found is not None
    assert found.step == 2


def test_an_older_checkpoint_of_another_place_is_no_way_on(tmp_path: Path) -> None:
    folder, checkpoints = start(config(tmp_path))
    measure(folder, "failed")
    older = save(checkpoints, 1)
    save(checkpoints, 2)
    with pytest.raises(ConfigError, match="step-000002"):
        start(config(tmp_path, dir=str(tmp_path / "elsewhere"), resume=older))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file: the run's folder cannot be written"):
        start(config(tmp_path / "file"))


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
