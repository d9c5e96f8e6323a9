"""The setup of every worker: threads, device, and the process group of its role."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch

from tandem.platform.config.schema import ConfigError

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Rank:
    """One worker's place among the ranks of its role."""

    index: int = 0
    world_size: int = 1
    threads: int | None = None  # torch threads; None keeps torch's default
    device: str = "auto"


def pick_device(device: str) -> torch.device:
    """The device that a setting selects in this process; under Ray, the device that Ray assigned.

    Raises:
        ConfigError: the setting is cuda and there is no CUDA device.
    """
    if device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", own_device_index())
    if device == "cuda":
        raise ConfigError("trainer.device is cuda, but torch sees no CUDA device here. Set trainer.device=cpu or auto")
    return torch.device("cpu")


def own_device_index() -> int:
    """The index, among the CUDA devices that torch sees, of this process's device."""
    return next(iter(own_device_indices()), 0)


def own_device_indices() -> list[int]:
    """The indices, among the CUDA devices that torch sees, of those that Ray assigned to this process; none outside Ray."""
    ray = _ray()
    assigned = [] if ray is None else [str(number) for number in ray.get_gpu_ids()]
    visible, noset = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get(NOSET, "").lower() in ("1", "true")
    return device_indices(assigned, visible, noset)


def device_indices(assigned: Sequence[str], visible: str | None, noset: bool) -> list[int]:
    """Indices of the assigned devices among the visible devices.

    Ray hides all other devices from a process unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set. In that case all
    devices of the node are visible, or those in CUDA_VISIBLE_DEVICES.

    Args:
        assigned: Ray's ids of the assigned devices; none outside Ray. visible: CUDA_VISIBLE_DEVICES. noset: whether
            RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    if not noset:
        return list(range(len(assigned)))
    if visible is None:
        return [int(name) for name in assigned]
    there = [name.strip() for name in visible.split(",")]
    return [there.index(name) for name in assigned if name in there]


def process_id(worker: Any) -> int:
    """The process id of the actor in which Ray runs this function.

    It is in this file because every worker has imported this file. In another file, the call could import more while
    `start` imports in another thread, and two threads cannot import transformers at the same time.
    """
    return os.getpid()


def use_threads(rank: Rank) -> None:
    """Limits torch's threads for the calling thread; OpenMP keeps a thread count per calling thread."""
    if rank.threads is not None:
        torch.set_num_threads(rank.threads)


def set_up(rank: Rank) -> torch.device:
    """Limits torch's threads and picks the device of this process."""
    show_stacks_on_request()
    use_threads(rank)
    device = pick_device(rank.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def show_stacks_on_request() -> None:
    """Makes this process write the stacks of all threads to its log on SIGUSR1, to show where it hangs."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


class Rendezvous:
    """The store where the ranks of a role meet: rank 0 listens on a free port, and only on its own address."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        host = _own_address()
        # By default the store would listen on every address of this machine, and it requires no password.
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.timeout = timedelta(seconds=timeout_s)
        self.address = (host, int(server.getsockname()[1]))
        self.store = torch.distributed.TCPStore(
            *self.address,
            world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            master_listen_fd=server.detach(),
        )


def join_process_group(rank: Rank, device: torch.device, address: tuple[str, int], store: Any, timeout_s: float) -> None:
    """Makes this process rank `rank.index` of a torch process group, over gloo on CPU and NCCL on CUDA.

    Args:
        address: (host, port) of rank 0's store. store: the store itself on rank 0, None on the other ranks.
    """
    # Without these variables DeepSpeed would look for MPI. It takes LOCAL_RANK as the device index of this process.
    os.environ |= {
        "RANK": str(rank.index),
        "LOCAL_RANK": str(device.index or 0),
        "WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }
    if torch.distributed.is_initialized():
        return  # another single-rank role in this process has created the group
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        host, port = address
        store = torch.distributed.TCPStore(host, port, rank.world_size, is_master=False, timeout=timeout)
    torch.distributed.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.world_size,
        timeout=timeout,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the allocator on CUDA, or resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # ru_maxrss is in KiB on Linux


@contextmanager
def own_interface() -> Iterator[None]:
    """Makes gloo use Ray's network interface while the body runs (the loopback for a private cluster). Gloo's default may
    be an interface that other nodes cannot reach, or should not.

    Child processes must not inherit the variable: on their node the interface may have another name.
    """
    address = _own_address()
    names = [name for name, there in psutil.net_if_addrs().items() if address in [entry.address for entry in there]]
    if "GLOO_SOCKET_IFNAME" in os.environ or not names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _own_address() -> str:
    """The address at which other nodes reach this one; the loopback without Ray."""
    ray = _ray()
    return socket.gethostbyname("localhost") if ray is None else str(ray.util.get_node_ip_address())


def _ray() -> Any:
    """The Ray module in a worker process of Ray, which has imported it already; None elsewhere."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
