"""Permissions of written files: from `run.share` for a run, and from the user's umask for an export."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MASKS = {"private": 0o077, "group": 0o027, "all": 0o022}
"""The umask for each choice of `run.share`."""


@contextmanager
def shared_with(share: str) -> Iterator[None]:
    """Makes files that this process and its children create in the body readable by the user only, the group, or all."""
    before = os.umask(MASKS[share])
    try:
        yield
    finally:
        os.umask(before)


def follow_umask(folder: Path) -> None:
    """Gives the folder and its contents the permissions of newly created files; skips links."""
    mask = os.umask(0o077)
    os.umask(mask)
    for root, _, files in os.walk(folder):
        os.chmod(root, 0o777 & ~mask)
        for file in (Path(root, name) for name in files):
            if not file.is_symlink():
                file.chmod(0o666 & ~mask)
