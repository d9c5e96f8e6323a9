"""The doctor's findings, on this machine and on machines with a problem."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tandem.launch import doctor
from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import Config


def config(*overrides: str) -> Config:
    return compose(overrides)[0]


@pytest.mark.slow
def test_a_machine_that_trains_passes(repo: Path) -> None:
    done = subprocess.run([sys.executable, "launch/doctor.py"], cwd=repo, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("fail")]
    for what in ("versions", "transformers", "vllm", "compiler", "GPU", "/dev/shm", "run.dir", "ports", "DeepSpeed", "Ray"):
        assert [line for line in lines if line.startswith(("ok", "warn")) and what in line], what


def test_an_unknown_setting_is_told_as_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["cluster.adress=x:1"]) == 2
    assert "Did you mean cluster.address?" in capsys.readouterr().err


def test_a_dead_cluster_fails_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    [finding] = doctor.check_ray(config(f"cluster.address=127.0.0.1:{port}"))
    assert finding.level == "fail"
    assert "ray start --head" in finding.found


def test_versions_other_than_the_pins_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "ray":
            raise doctor.PackageNotFoundError
        return {"torch": "2.0.0+cpu"}.get(package, own(package))

    own = doctor.version
    monkeypatch.setattr(doctor, "version", version)
    found = {finding.what: finding for finding in doctor.check_versions(config())}
    assert (found["ray"].level, found["torch"].level) == ("fail", "warn")
    assert found["torch"].found.startswith("2.0.0+cpu; ")
    assert found["torch"].fix.startswith("pip install torch==")
    assert "numpy" not in found


def test_too_little_space_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 2**20))
    findings = list(doctor.check_space(config()))
    assert [finding.level for finding in findings] == ["warn"] * 3
    assert findings[0].found == "1.0 MiB free in /dev/shm"


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    [finding] = doctor.check_compiler(config())
    assert finding.level == "warn"
    assert "g++" in finding.fix


def test_cuda_without_a_device_fails() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        return
    [finding] = doctor.check_devices(config("trainer.device=cuda"))
    assert finding.level == "fail"


def test_code_that_fails_shows_its_last_line() -> None:
    finding = doctor._tried("x", "import sys; raise ValueError('no such thing')", "mend it")
    assert (finding.level, finding.found, finding.fix) == ("fail", "ValueError: no such thing", "mend it")
    assert str(finding).splitlines()[1].strip() == "-> mend it"


def test_code_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TRY_TIMEOUT_S", 1)
    assert doctor._tried("x", "import time; time.sleep(60)", "").found == "still running after 1 s"
