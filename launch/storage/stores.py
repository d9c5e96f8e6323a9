"""Access to checkpoint files in a local folder or an object store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import LARGEST_FILE, read_bytes

CHECKPOINTS = "checkpoints"  # the subfolder for checkpoints in a run's folder


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a folder or address, and the path within it.

    Raises:
        ConfigError: the kind of address is not supported.
    """
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"checkpoint.dir={url}: {error}. Install what it needs, or give a folder") from error
    return fs, str(root).rstrip("/")


def read_file(fs: Any, path: str, checkpoint: str, limit: int = LARGEST_FILE) -> bytes:
    """Reads a file of a checkpoint. A local file must be regular, not be below a link, and have at most `limit` bytes."""
    if isinstance(fs, LocalFileSystem):
        return read_bytes(Path(path), below=base(checkpoint), limit=limit)
    return bytes(fs.cat_file(path))


def base(checkpoint: str) -> Path:
    """The folder below which a checkpoint's path must not contain links: the run's folder, if the checkpoint is in one."""
    place = Path(checkpoint).parent
    return place.parent if place.name == CHECKPOINTS else place


def sync(folder: str) -> None:
    """Waits until a folder's entries are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
