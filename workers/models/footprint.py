"""Measures memory: of weights, of a process's baseline, and of activations kept for the backward pass."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, from their shapes and dtypes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def model_bytes(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return tensor_bytes(model.parameters())


def baseline_bytes(device: torch.device, held: int) -> int:
    """Resident bytes of this process minus the `held` bytes of known tensors: interpreter, libraries, caches.

    0 on CUDA, where peaks come from the allocator, which counts only tensors.
    """
    if device.type == "cuda":
        return 0
    return max(0, int(psutil.Process().memory_info().rss) - held)


class Activations:
    """Bytes that the largest forward pass so far kept for its backward pass, counted from the tensors.

    Each storage counts once; parameters do not count. Logits and log-probs count only as far as autograd keeps them. Only
    a pass larger than all before is measured, so other passes cost nothing.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._largest = 0  # elements of its micro-batch

    @contextmanager
    def watch(self, elements: int) -> Iterator[None]:
        """Measures the body, a forward pass over a micro-batch of `elements` elements."""
        if elements <= self._largest:
            yield
            return
        self._largest = elements
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if not (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        def give(saved: Any) -> Any:
            return saved

        with torch.autograd.graph.saved_tensors_hooks(note, give):
            yield
        self.bytes = max(self.bytes, sum(storages.values()))


def available_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new processes on this machine can use, within the limits of the cgroup and of this process."""
    limits = [int(psutil.virtual_memory().available)]
    if (left := _cgroup_left(root)) is not None:
        limits.append(left)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)  # children inherit it
    if space != resource.RLIM_INFINITY:
        limits.append(max(0, space - int(psutil.Process().memory_info().vms)))
    return min(limits)


def _cgroup_left(root: Path) -> int | None:
    """Bytes left to the limit of the cgroup (version 2 or 1) at `root`; reclaimable file cache counts as free."""
    for folder, most, now, file in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (folder / most).read_text().strip(), int((folder / now).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return None if limit == "max" else max(0, int(limit) - used + int(stat.get(file, 0)))
        except (OSError, ValueError):
            continue
    return None
