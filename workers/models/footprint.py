"""What a process needs memory for: its baseline, and what a forward pass keeps for the backward pass."""

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
    """Bytes of tensors, from their shapes and types."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def model_bytes(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return tensor_bytes(model.parameters())


def baseline_bytes(device: torch.device, held: int) -> int:
    """What is resident now, less the `held` bytes that are known: interpreter, libraries, their caches.

    On CUDA 0: the allocator, whose peak is compared with, counts tensors alone.
    """
    if device.type == "cuda":
        return 0
    return max(0, int(psutil.Process().memory_info().rss) - held)


class Activations:
    """Bytes that the largest forward pass so far has kept for its backward pass, from the tensors themselves.

    Each storage counts once, parameters do not: logits and log-probs count as what autograd keeps of them. Only a pass
    larger than all before is looked at, so that the others cost nothing.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._largest = 0  # elements of its micro-batch

    @contextmanager
    def watch(self, elements: int) -> Iterator[None]:
        """The body is a forward pass over so many elements."""
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
    """Memory that new processes of this machine can take: within the limits of its cgroup and of this process."""
    limits = [int(psutil.virtual_memory().available)]
    if (left := _cgroup_left(root)) is not None:
        limits.append(left)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)  # children inherit it
    if space != resource.RLIM_INFINITY:
        limits.append(max(0, space - int(psutil.Process().memory_info().vms)))
    return min(limits)


def _cgroup_left(root: Path) -> int | None:
    """Bytes to the limit of the cgroup at `root`, version 2 or 1; files that it can let go count as free."""
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
