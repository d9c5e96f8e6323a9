"""Checkpoints on disk and in an object store: complete or absent, however writing ended."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.launch.storage import checkpoints as module
from tandem.launch.storage.checkpoint import CheckpointError
from tandem.launch.storage.checkpoints import Checkpoints, open_newest
from tandem.platform.config.schema import ConfigError

WRITER = """
import sys, torch
from tandem.launch.storage.checkpoints import Checkpoints
sys.path.insert(0, sys.argv[2])
from test_checkpoints import Role, save
store = Checkpoints(sys.argv[1], keep=2)
step = 0
while True:
    step += 1
    save(store, step, size=200_000)
    print(step, flush=True)
"""


class Role:
    """A trained role whose tensors all hold the number of the step."""

    def __init__(self, value: float = 0.0, size: int = 3) -> None:
        self.value, self.size = value, size

    def state_parts(self) -> Iterator[Mapping[str, Tensor]]:
        for number in range(3):
            yield {f"weights/{number}": torch.full((self.size,), self.value)}

    def state_facts(self) -> list[dict[str, Any]]:
        return [{"updates": int(self.value)}]

    def load_state(self, parts: Iterable[Mapping[str, Tensor]], facts: Sequence[dict[str, Any]]) -> None:
        raise AssertionError

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}


def save(store: Checkpoints, step: int, score: float | None = None, size: int = 3) -> str:
    def model(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"step": step}))

    roles = {"actor": Role(step, size), "critic": Role(step, size)}
    return store.save(step, {"step": step}, roles, model, {"run.seed": 0}, score)


def steps(store: Checkpoints) -> list[int]:
    return [int(path.rpartition("-")[2]) for path, _ in store._whole()]


def check_whole(store: Checkpoints) -> int:
    """Asserts that all parts of the newest checkpoint are from one step; returns the step."""
    found = store.find("auto", lambda text: None)
    assert found is not None
    assert found.driver() == {"step": found.step}
    for role in ("actor", "critic"):
        assert found.facts(role) == [{"updates": found.step}]
        parts = list(found.parts(role))
        assert len(parts) == 3
        assert all(torch.equal(tensor, torch.full_like(tensor, found.step)) for part in parts for tensor in part.values())
    return found.step


@pytest.fixture(params=["disk", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "own") if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


def test_what_is_saved_is_found(url: str) -> None:
    store = Checkpoints(url, keep=2)
    assert store.find("auto", print) is None
    save(store, 1)
    assert check_whole(store) == 1
    path = save(store, 12)
    assert check_whole(Checkpoints(url, keep=2)) == 12
    assert open_newest(url).step == 12
    assert open_newest(path if "memory" not in url else f"memory://{path}").step == 12
    found = store.find("auto", print)
    assert store.is_newest(found)
    assert found is not None
    assert found.settings == {"run.seed": 0}
    assert store.find("never", print) is None


def test_the_newest_and_the_best_stay(url: str) -> None:
    """Checkpoints written by another `Checkpoints` object count too."""
    for step, score in [(1, 0.9), (2, 0.2), (3, 0.5), (4, 0.1), (5, None)]:
        save(Checkpoints(url, keep=2, keep_best=2), step, score)
    assert steps(Checkpoints(url, 2)) == [1, 3, 4, 5]
    save(Checkpoints(url, keep=1), 6)
    assert steps(Checkpoints(url, 1)) == [6]


@pytest.mark.parametrize("victim", ["driver.json", "actor/00001.safetensors", "model/config.json", "critic/facts.json"])
@pytest.mark.parametrize("how", ["missing", "short"])
def test_the_newest_whole_one_is_used(tmp_path: Path, victim: str, how: str) -> None:
    store = Checkpoints(str(tmp_path), keep=3)
    for step in (1, 2):
        save(store, step)
    path = tmp_path / "step-000002" / victim
    path.unlink() if how == "missing" else path.write_bytes(path.read_bytes()[:-1])
    notes: list[str] = []
    found = store.find("auto", notes.append)
    assert found is not None
    assert found.step == 1
    assert len(notes) == 1
    assert victim in notes[0]
    assert "step-000001 instead" in notes[0]
    with pytest.raises(ConfigError, match=victim):
        store.find(str(tmp_path / "step-000002"), print)


def test_a_damaged_newer_one_costs_no_whole_one(tmp_path: Path) -> None:
    """A run resumes from step 2 because step 4 is damaged; with keep=1, step 3 is then the newest complete checkpoint."""
    for step in (2, 4):
        save(Checkpoints(str(tmp_path), keep=2), step)
    (tmp_path / "step-000004" / "driver.json").unlink()
    store = Checkpoints(str(tmp_path), keep=1)
    assert store.is_newest(store.find("auto", print))
    save(store, 3)
    assert check_whole(store) == 3
    assert not (tmp_path / "step-000002").exists()
    save(store, 4)
    assert check_whole(store) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_a_manifest_that_was_cut_off(tmp_path: Path) -> None:
    store = Checkpoints(str(tmp_path), keep=2)
    for step in (2, 4):
        save(store, step)
    path = tmp_path / "step-000004" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    notes: list[str] = []
    found = store.find("auto", notes.append)
    assert found is not None
    assert found.step == 2
    assert "manifest.json, column" in notes[0]
    assert store.is_newest(found)


def test_what_a_person_has_put_there_stays(tmp_path: Path) -> None:
    store = Checkpoints(str(tmp_path), keep=1)
    save(store, 2)
    (tmp_path / "step-000002").rename(tmp_path / "best-step-000002")
    save(store, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-step-000002", "step-000004"]


def test_an_object_store_is_not_whole_while_a_step_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(f"memory://{uuid.uuid4().hex}", keep=2)
    for step in (2, 4):
        save(store, step)
    write = store.fs.pipe_file

    def die(path: str, content: bytes) -> None:
        if "critic" in path:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(store.fs, "pipe_file", die)
    with pytest.raises(KeyboardInterrupt):
        save(store, 4)
    monkeypatch.undo()
    assert check_whole(store) == 2


def test_none_is_whole(tmp_path: Path) -> None:
    """If no checkpoint is complete, the run is refused instead of silently starting over."""
    store = Checkpoints(str(tmp_path), keep=3)
    (tmp_path / "step-000001").mkdir()
    with pytest.raises(ConfigError, match=r"step-000001 is not a complete checkpoint.*checkpoint\.resume=never"):
        store.find("auto", print)


def test_content_that_was_changed_is_refused(tmp_path: Path) -> None:
    store = Checkpoints(str(tmp_path), keep=3)
    save(store, 1)
    path = tmp_path / "step-000001" / "actor" / "00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    found = store.find("auto", print)
    assert found is not None
    with pytest.raises(CheckpointError, match=r"actor/00001\.safetensors has changed since it was written.*Remove"):
        list(found.parts("actor"))


@pytest.mark.parametrize("failing", range(1, 14))
def test_a_full_disk_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """If writing a file or syncing a folder fails, the run ends with a clear error and can be resumed later."""
    store = Checkpoints(str(tmp_path), keep=1)
    save(store, 2)
    calls, sync = 0, os.fsync

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 4: .* cannot be written: .*No space left on device"):
        save(store, 4)
    monkeypatch.setattr(module.os, "fsync", sync)
    assert check_whole(store) == 2
    save(Checkpoints(str(tmp_path), keep=1), 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]


def test_an_object_store_that_fails_leaves_no_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(f"memory://{uuid.uuid4().hex}", keep=1)
    save(store, 2)
    write = store.fs.pipe_file

    def fail(path: str, content: bytes) -> None:
        if "critic" in path:
            raise OSError("the network is gone")
        write(path, content)

    monkeypatch.setattr(store.fs, "pipe_file", fail)
    with pytest.raises(CheckpointError, match="the network is gone"):
        save(store, 4)
    monkeypatch.undo()
    assert check_whole(store) == 2
    save(store, 4)
    assert steps(store) == [4]


def test_a_place_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints cannot be written there.*checkpoint\.dir"):
        Checkpoints(str(tmp_path / "file"), keep=1).check_writable()
    Checkpoints(str(tmp_path / "new"), keep=1).check_writable()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(Checkpoints(str(tmp_path / "file" / "below"), keep=1), 1)


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_ones(tmp_path: Path) -> None:
    """After SIGKILL at any byte, the checkpoint found is complete, from one step, and at least as new as before."""
    for attempt in range(8):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # the first checkpoint is complete
        time.sleep(0.004 * attempt)
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        store = Checkpoints(str(tmp_path), keep=2)
        assert check_whole(store) >= max([1, *map(int, said)])
    assert not list(tmp_path.glob("step-*/*.part"))


def test_unknown_storage_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.dir=nowhere://x"):
        Checkpoints("nowhere://x", keep=1)
