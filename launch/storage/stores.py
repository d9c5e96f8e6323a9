"""Where checkpoints are, a folder or an object store, and how their files are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import LARGEST_FILE, read_bytes

CHECKPOINTS = "checkpoints"  # the folder of them in that of a run


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a folder or address, and the path there.

    Raises:
        ConfigError: there is no such kind of address.
    """
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"checkpoint.dir={url}: {error}. Install what it needs, or give a folder") from error
    return fs, str(root).rstrip("/")


def read_file(fs: Any, path: str, checkpoint: str, limit: int = LARGEST_FILE) -> bytes:
    """A file of a checkpoint: on a local disk a regular one, without a link on the way, of no more bytes than the limit."""
    if isinstance(fs, LocalFileSystem):
        return read_bytes(Path(path), below=base(checkpoint), limit=limit)
    return bytes(fs.cat_file(path))


def base(checkpoint: str) -> Path:
    """The folder below which nothing of a checkpoint may be a link: that of the run, where it is in one."""
    place = Path(checkpoint).parent
    return place.parent if place.name == CHECKPOINTS else place


def sync(folder: str) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
