"""Only one run at a time writes checkpoints into a place, on disk or in an object store, however the other run ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tandem.launch.storage import lease as module
from tandem.launch.storage.checkpoints import Checkpoints
from tandem.launch.storage.lease import LeaseLost, only_writer
from tandem.platform.config.schema import ConfigError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWED_S", 0.1)
    monkeypatch.setattr(module, "DEAD_AFTER_S", 1.0)


@pytest.fixture
def store() -> tuple[Any, str]:
    return fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after whose call other processes cannot see this process, as if it were on another machine."""
    return lambda: monkeypatch.setattr(module, "_pids_of", lambda: uuid.uuid4().hex)


def leases(fs: Any, root: str) -> list[str]:
    return [path for path in fs.ls(root, detail=False) if module.PREFIX in path]


def test_a_second_writer_is_refused_while_the_first_lives(store: tuple[Any, str], elsewhere: Callable[[], None]) -> None:
    elsewhere()
    notes: list[str] = []
    with only_writer(*store, notes.append) as check:
        with (
            pytest.raises(ConfigError, match=r"another run writes checkpoints into .* \(process \d+ on .*Wait for it"),
            only_writer(*store, notes.append),
        ):
            pass
        check()
        assert len(leases(*store)) == 1
    assert [note.partition(":")[0] for note in notes] == ["waiting up to 1 s"]
    assert leases(*store) == []
    with only_writer(*store, notes.append):
        pass


def test_the_lease_of_a_dead_holder_is_taken_over(store: tuple[Any, str], elsewhere: Callable[[], None]) -> None:
    elsewhere()
    fs, root = store
    fs.pipe_file(f"{root}/{module.PREFIX}dead.json", b"whatever")
    start = time.monotonic()
    with only_writer(fs, root, print) as check:
        check()
    assert 1.0 <= time.monotonic() - start < 2.0
    assert leases(fs, root) == []


def test_a_holder_that_died_on_this_machine_is_not_waited_for(
    store: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DEAD_AFTER_S", 60.0)
    fs, root = store
    with subprocess.Popen([sys.executable, "-c", "pass"]) as other:
        other.wait()
    holder = {**module._this_process(), "pid": other.pid}
    fs.pipe_file(f"{root}/{module.PREFIX}dead.json", json.dumps(holder).encode())
    start = time.monotonic()
    with only_writer(fs, root, print):
        pass
    assert time.monotonic() - start < 5.0


def test_who_lost_the_lease_saves_nothing(store: tuple[Any, str], elsewhere: Callable[[], None]) -> None:
    """A run can lose its lease if its network fails for longer than another run waits."""
    elsewhere()
    fs, root = store
    checkpoints = Checkpoints(f"memory://{root}", keep=1)
    with only_writer(fs, root, print) as checkpoints.check_alone:
        for path in leases(fs, root):
            fs.rm_file(path)
        with only_writer(fs, root, print) as check:
            with pytest.raises(LeaseLost, match="another run has taken over"):
                checkpoints.save(1, {}, {}, lambda folder: None, {}, None)
            time.sleep(0.3)
            check()  # the first run has not written its lease again
            assert not checkpoints.has_any()


def test_of_many_at_once_at_most_one_writes(store: tuple[Any, str], elsewhere: Callable[[], None]) -> None:
    elsewhere()
    writing, most, outcomes = [0], [0], []
    lock = threading.Lock()

    def compete() -> None:
        try:
            with only_writer(*store, lambda text: None) as check:
                with lock:
                    writing[0] += 1
                    most[0] = max(most[0], writing[0])
                time.sleep(0.5)
                check()
                with lock:
                    writing[0] -= 1
            outcomes.append("wrote")
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=compete) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(outcomes) == 6
    assert leases(*store) == []


def test_on_a_disk_it_is_a_lock(tmp_path: Path) -> None:
    """On a disk, the lease is a file lock, which the system releases as soon as its process is killed."""
    code = (
        "import sys\nfrom tandem.launch.storage.checkpoints import Checkpoints\n"
        "from tandem.launch.storage.lease import only_writer\n"
        "held = Checkpoints(sys.argv[1], keep=1)\n"
        "with only_writer(held.fs, held.root, print): print('held', flush=True); input()"
    )
    own = Checkpoints(str(tmp_path / "shared"), keep=1)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, own.root], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=r"another process trains into .*shared\. .*checkpoint\.dir"),
            only_writer(own.fs, own.root, print),
        ):
            pass
        other.kill()
    with only_writer(own.fs, own.root, print):
        assert list(Path(own.root).iterdir()) == []


def test_a_disk_without_locks_has_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    own = Checkpoints(str(tmp_path), keep=1)
    with ExitStack() as stack:
        stack.enter_context(only_writer(own.fs, own.root, print))
        assert len(list(tmp_path.glob(f"{module.PREFIX}*"))) == 1
        with pytest.raises(ConfigError, match="another run writes"):
            stack.enter_context(only_writer(own.fs, own.root, print))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")

    def refuse(path: str, content: bytes) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(type(fs), "pipe_file", staticmethod(refuse))
    with (
        pytest.raises(ConfigError, match=r"cannot be written there: read only\. Set checkpoint\.dir"),
        only_writer(fs, "/store", print),
    ):
        pass
