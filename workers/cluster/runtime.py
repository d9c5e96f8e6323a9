"""What every worker does first: threads, device, and the process group of its ranks."""

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
    threads: int | None = None  # torch threads; None leaves torch's own choice
    device: str = "auto"


def pick_device(device: str) -> torch.device:
    """The device a setting means here; under Ray the one it gave this process.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    if device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", own_device_index())
    if device == "cuda":
        raise ConfigError("trainer.device is cuda, but torch sees no CUDA device here. Set trainer.device=cpu or auto")
    return torch.device("cpu")


def own_device_index() -> int:
    """Which of the CUDA devices that torch sees is this process's own."""
    return next(iter(own_device_indices()), 0)


def own_device_indices() -> list[int]:
    """Which of the CUDA devices that torch sees Ray gave to this process; none outside Ray."""
    ray = _ray()
    given = [] if ray is None else [str(number) for number in ray.get_gpu_ids()]
    visible, noset = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get(NOSET, "").lower() in ("1", "true")
    return device_indices(given, visible, noset)


def device_indices(given: Sequence[str], visible: str | None, noset: bool) -> list[int]:
    """Places of the devices that Ray gave among those that are visible.

    Ray makes a process see its own devices alone, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES forbids it: then all
    of the node's are visible, or those that CUDA_VISIBLE_DEVICES named before.

    Args:
        given: ids of the devices, as Ray calls them; none outside Ray. visible: CUDA_VISIBLE_DEVICES.
    """
    if not noset:
        return list(range(len(given)))
    if visible is None:
        return [int(name) for name in given]
    there = [name.strip() for name in visible.split(",")]
    return [there.index(name) for name in given if name in there]


def process_id(worker: Any) -> int:
    """The process in which Ray calls this with an actor.

    Here, since a worker has imported this file. Anywhere else, the call would import more while `start` does in another
    thread, and transformers cannot be imported by two threads at once.
    """
    return os.getpid()


def use_threads(rank: Rank) -> None:
    """Bounds the threads of what the calling thread computes; OpenMP keeps a number for each calling thread."""
    if rank.threads is not None:
        torch.set_num_threads(rank.threads)


def set_up(rank: Rank) -> torch.device:
    """Bounds torch's threads and picks the device of this process."""
    show_stacks_on_request()
    use_threads(rank)
    device = pick_device(rank.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def show_stacks_on_request() -> None:
    """On SIGUSR1 this process writes the stacks of all its threads into its log: what it hangs in."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


class Rendezvous:
    """Where the ranks of a role meet: rank 0 listens on a free port of its own from here on, and on its address alone."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        host = _own_address()
        # Left to itself, the store would listen on every address of this machine, and it asks for no password.
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
        address: (host, port) of rank 0's store. store: rank 0's own store, None on the other ranks.
    """
    # DeepSpeed reads these, and would look for MPI without them. By LOCAL_RANK it means the device of this process.
    os.environ |= {
        "RANK": str(rank.index),
        "LOCAL_RANK": str(device.index or 0),
        "WORLD_SIZE": str(rank.world_size),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }
    if torch.distributed.is_initialized():
        return  # another role of one rank in this process made it
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
    """The most memory so far: of the allocator on CUDA, resident in this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # ru_maxrss is in KiB on Linux


@contextmanager
def own_interface() -> Iterator[None]:
    """For the body, gloo meets on the network that Ray uses, the loopback for a private cluster; its own choice may be
    another, which other nodes cannot reach, or which they should not.

    Children must not inherit it: on their node the network may have another name.
    """
    own = _own_address()
    names = [name for name, there in psutil.net_if_addrs().items() if own in [entry.address for entry in there]]
    if "GLOO_SOCKET_IFNAME" in os.environ or not names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _own_address() -> str:
    """The address other nodes reach this one by; the loopback where Ray does not know one."""
    ray = _ray()
    return socket.gethostbyname("localhost") if ray is None else str(ray.util.get_node_ip_address())


def _ray() -> Any:
    """Ray, in a process that it runs; None elsewhere. A process of Ray has loaded it, so it is not imported here."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
