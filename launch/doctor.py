"""Checks that this machine can run tandem: `python launch/doctor.py [cluster.address=host:port]`.

Prints a line per check: ok, warn or fail, the finding, and what to do. Exits with 1 if a check failed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from tandem.launch.compose.command import command
from tandem.launch.compose.compose import compose
from tandem.launch.settings import settings_table
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.system.terminal import say
from tandem.platform.system.text import human_bytes
from tandem.workers.cluster.cluster import check_answers, usable_cpus

USAGE = """usage: python launch/doctor.py [cluster.address=HOST:PORT] [SETTING=VALUE ...]

Checks that this machine, or a cluster, can run tandem with these settings. Prints a line per check: ok, warn or fail, the
finding, and what to do. Exits with 1 if a check failed."""
TRY_TIMEOUT_S = 120
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The result of a check. `level`: ok, warn (a run may work) or fail (a run will not work)."""

    level: str
    what: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.what:<14} {self.found}" + (f"\n      {'':<14} -> {self.fix}" if self.fix else "")


def check_versions(config: Config) -> Iterable[Finding]:
    """Compares the pinned packages with the installed ones."""
    requirements = re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.]+)(; extra)?", "\n".join(_required()), re.MULTILINE)
    pins = {package: wanted for package, wanted, _ in requirements}
    needed = {package for package, _, extra in requirements if not extra}
    for package, wanted in pins.items():
        try:
            there = version(package)
        except PackageNotFoundError:
            if package in needed:
                yield Finding(
                    "fail", package, f"not installed; {wanted} is pinned", "run `make train`, which sets up what is missing"
                )
            continue
        if there.partition("+")[0] != wanted:
            yield Finding("warn", package, f"{there}; {wanted} is pinned and tested", f"pip install {package}=={wanted}")
    if not pins:
        yield Finding(
            "warn", "tandem-rl", "not installed as a package, so its pins are unknown", "pip install --editable ."
        )
    else:
        yield Finding("ok", "versions", f"{len(pins)} pinned packages checked, Python {sys.version.split()[0]}")


def check_imports(config: Config) -> Iterable[Finding]:
    """Imports, each in its own process, the libraries that break if another package has the wrong version."""
    yield _tried(
        "transformers", "from transformers import Qwen2ForCausalLM", "pip uninstall torchvision torchaudio torchcodec"
    )
    wanted = config.rollout.engine == "vllm"
    finding = _tried(
        "vllm", "import vllm; print(vllm.__version__)", "pip install --editable '.[gpu]', or '.[cpu]' without a GPU"
    )
    if finding.level == "fail" and not wanted:
        finding = Finding("warn", finding.what, f"{finding.found}; only rollout.engine=vllm needs it", finding.fix)
    yield finding


def check_compiler(config: Config) -> Iterable[Finding]:
    """Looks for a C++ compiler, which builds vLLM's kernels and DeepSpeed's own ops."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler:
        yield Finding("ok", "compiler", compiler)
    else:
        yield Finding("warn", "compiler", "no C++ compiler", "install g++: vLLM compiles kernels on first use")


def check_devices(config: Config) -> Iterable[Finding]:
    """Compares the GPUs that the system lists with those that torch sees."""
    import torch

    listed = _output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen:
        yield Finding("ok", "GPU", f"{seen}: {listed or torch.cuda.get_device_name(0)}; CUDA {torch.version.cuda}")
    elif listed:
        fix = "install the CUDA build of the pinned torch, and a driver that is new enough for it"
        yield Finding("fail", "GPU", f"the system has {listed}, but torch {torch.__version__} sees none", fix)
    elif config.trainer.device == "cuda":
        yield Finding("fail", "GPU", "none, but trainer.device=cuda", "set trainer.device=auto")
    else:
        yield Finding("ok", "GPU", f"none; models run on {usable_cpus()} CPUs")


def check_space(config: Config) -> Iterable[Finding]:
    """Checks shared memory, which passes weights between processes, and disk space for runs and Ray's logs."""
    for what, folder, least in (
        ("/dev/shm", Path("/dev/shm"), GIB),
        ("run.dir", _existing(Path(config.run.dir)), GIB),
        ("Ray's folder", _existing(Path(os.environ.get("RAY_TMPDIR", "/tmp"))), 2 * GIB),
    ):
        try:
            free = shutil.disk_usage(folder).free
        except OSError as error:
            yield Finding("fail", what, str(error), f"make {folder} readable")
            continue
        level = "ok" if free >= least else "warn"
        fix = "" if level == "ok" else f"free some space: {human_bytes(least)} or more is needed"
        yield Finding(level, what, f"{human_bytes(free)} free in {folder}", fix)
        if not os.access(folder, os.W_OK):
            yield Finding(
                "fail",
                what,
                f"{folder} cannot be written",
                "set run.dir to a folder that you can write" if what == "run.dir" else "",
            )


def check_ports(config: Config) -> Iterable[Finding]:
    """Checks that processes of this machine can reach each other at its address."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
    except OSError as error:
        yield Finding("fail", "ports", f"{host} does not reach itself: {error}", "check /etc/hosts and the firewall")
    else:
        yield Finding("ok", "ports", f"{host} reaches itself at {address}")


def check_deepspeed(config: Config) -> Iterable[Finding]:
    """Runs one optimizer step of a DeepSpeed engine with one rank."""
    code = (
        "import torch; from torch import nn; from tandem.platform.experience.batch import LossOutput;"
        "from tandem.platform.config.schema import ModelConfig, OptimizerConfig, TrainerConfig;"
        "from tandem.workers.cluster.runtime import Rank, Rendezvous, pick_device;"
        "from tandem.workers.training.deepspeed import DeepSpeedBackend;"
        "meeting = Rendezvous(1, 60.0); device = pick_device('auto'); model = nn.Linear(2, 1);"
        "args = (model, 'actor', OptimizerConfig(), TrainerConfig(), ModelConfig(), Rank(), device);"
        "engine = DeepSpeedBackend(*args, (meeting.address, meeting, 60.0)).engine;"
        "engine.backward(engine(torch.ones(1, 2, device=device)).sum()); engine.step(); print('one step on', device)"
    )
    yield _tried("DeepSpeed", code, "see the error; the pinned versions of torch and deepspeed belong together")


def check_ray(config: Config) -> Iterable[Finding]:
    """Runs one task on a private Ray, or on the cluster at `cluster.address`."""
    if config.cluster.address is not None:
        try:
            check_answers(config.cluster.address)
        except ConfigError as error:
            yield Finding("fail", "cluster", str(error))
            return
    address = f"cluster.address={config.cluster.address}" if config.cluster.address else "a private Ray"
    code = (
        "import ray\nfrom tandem.platform.config.schema import ClusterConfig\n"
        "from tandem.workers.cluster.cluster import connected\n"
        f"with connected(ClusterConfig(address={config.cluster.address!r})):\n"
        "    f = ray.remote(lambda: sum(range(4))); assert ray.get(f.remote(), timeout=60) == 6\n"
        "    cpus, nodes = ray.cluster_resources().get('CPU', 0), len(ray.nodes())\n"
        f"    print({address!r}, 'runs tasks;', f'{{cpus:g}} CPUs, {{nodes}} nodes')"
    )
    yield _tried("Ray", code, "see the error; Ray's files are in RAY_TMPDIR, or else in /tmp")


CHECKS: tuple[Callable[[Config], Iterable[Finding]], ...] = (
    check_versions,
    check_imports,
    check_compiler,
    check_devices,
    check_space,
    check_ports,
    check_deepspeed,
    check_ray,
)


@command("configuration error", USAGE, settings_table)
def main(arguments: list[str]) -> int:
    """Prints each finding as soon as it is known; returns the exit code (0 no failures, 1 a check failed, 2 not run)."""
    config, _ = compose(arguments)
    failed = False
    for check in CHECKS:
        for finding in check(config):
            say(finding)
            failed = failed or finding.level == "fail"
    return 1 if failed else 0


def _required() -> list[str]:
    try:
        return requires("tandem-rl") or []
    except PackageNotFoundError:
        return []


def _tried(what: str, code: str, fix: str) -> Finding:
    """Runs code in a separate Python process; its last line of output is the finding."""
    start = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TRY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding("fail", what, f"still running after {TRY_TIMEOUT_S} s", fix)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Finding("fail", what, lines[-1] if lines else f"ended with {done.returncode}", fix)
    said = [line for line in done.stdout.splitlines() if line.strip()][-1:]
    return Finding("ok", what, f"{said[0] if said else 'imports'} ({time.monotonic() - start:.0f} s)")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(done.stdout.strip().splitlines())


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


if __name__ == "__main__":
    sys.exit(main())
