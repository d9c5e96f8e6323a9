"""Who may read what a command writes: `run.share` for a run, the umask of the user for an export."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MASKS = {"private": 0o077, "group": 0o027, "all": 0o022}
"""By choice of `run.share`, the permissions that new files do not get."""


@contextmanager
def shared_with(share: str) -> Iterator[None]:
    """For the body, what this process and its children create can be read by the user alone, the group, or all."""
    before = os.umask(MASKS[share])
    try:
        yield
    finally:
        os.umask(before)


def follow_umask(folder: Path) -> None:
    """Gives the folder and what is in it the permissions of newly made files; links are left alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for root, _, files in os.walk(folder):
        os.chmod(root, 0o777 & ~mask)
        for file in (Path(root, name) for name in files):
            if not file.is_symlink():
                file.chmod(0o666 & ~mask)
