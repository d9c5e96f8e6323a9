"""How a bucket of weights gets from the trainer to the rollout replicas: from its first rank, or by `ipc` from every one.

    shared     through Ray's object store: shared memory on one host, a copy over the network to others
    ipc        by CUDA IPC handles: nothing is copied; the trainer and the replicas share a GPU
    broadcast  one collective for all replicas: NCCL between GPUs, gloo between CPUs; for several hosts

A transport has two ends. `send` returns what travels in the Ray call, `receive` makes tensors of it.

With `broadcast` all ends are lost when one of them dies. None waits for it, and none fails: the sender goes on in the
calls, a receiver says what it has missed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.platform.config.schema import ConfigError
from tandem.workers.cluster.runtime import own_interface

CPU = torch.device("cpu")
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # arrays in Ray's shared memory never are
Bucket = dict[str, Tensor]


@dataclass(frozen=True)
class Channel:
    """What an end needs to know to open its transport."""

    transport: str
    rank: int = 0  # 0: the sender
    size: int = 1
    address: tuple[str, int] = ("", 0)  # of a store that all ends can reach
    name: str = ""  # new for every set of ends
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Sent:
    """A bucket on its way."""

    content: Any  # as the transport's `send` made it
    verify: bool  # whether both ends take checksums


class Missed(RuntimeError):
    """A bucket did not arrive: an end of the broadcast is gone."""


class Transport(Protocol):
    """One end."""

    device: torch.device
    """Where the sender's tensors must be."""
    from_every_rank: bool
    """Whether every rank of the trainer sends, to the replica on its own device; else the first sends to all."""

    def send(self, bucket: Bucket) -> Any:
        """What the receivers are to be given; the tensors must stay as they are until the next call."""
        ...

    def receive(self, sent: Any) -> Bucket:
        """The tensors of a bucket; raises Missed if they cannot arrive any more."""
        ...

    def finish(self) -> None:
        """Returns when nothing is on the way any more."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a bucket lie in one run of bytes."""

    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]  # name, dtype, shape, first byte, bytes
    size: int

    @staticmethod
    def of(bucket: Bucket) -> Layout:
        """Tensors one after the other, each on a boundary of 16 bytes, which suits every dtype."""
        tensors, offset = [], 0
        for name, tensor in bucket.items():
            size = tensor.numel() * tensor.element_size()
            tensors.append((name, tensor.dtype, tuple(tensor.shape), offset, size))
            offset += -(-size // 16) * 16
        return Layout(tensors, offset)

    def pack(self, bucket: Bucket, device: torch.device) -> Tensor:
        """(size,) uint8."""
        flat = torch.empty(self.size, dtype=torch.uint8, device=device)
        for name, dtype, shape, offset, size in self.tensors:
            if size:
                flat[offset : offset + size].view(dtype).view(shape).copy_(bucket[name])
        return flat

    def unpack(self, flat: Tensor) -> Bucket:
        """The tensors, as views."""
        return {
            name: flat[offset : offset + size].view(dtype).view(shape) for name, dtype, shape, offset, size in self.tensors
        }


@dataclass(frozen=True)
class Packed:
    """A bucket as one run of bytes."""

    layout: Layout
    content: NDArray[np.uint8]  # Ray sends and receives arrays without taking them apart

    def unpack(self) -> Bucket:
        """The tensors, as views; only to be read."""
        return self.layout.unpack(torch.from_numpy(self.content))


class ObjectStore:
    """`shared`: the bytes travel in the call. On the sender's host they are read where they lie."""

    device = CPU
    from_every_rank = False

    def send(self, bucket: Bucket) -> Packed:
        """All tensors in one array, of which Ray makes one copy, into shared memory."""
        layout = Layout.of(bucket)
        return Packed(layout, layout.pack(bucket, CPU).numpy())

    def receive(self, sent: Packed) -> Bucket:
        """Tensors that are only to be read."""
        return sent.unpack()

    def finish(self) -> None:
        """Nothing: a call that has returned has everything."""


class CudaIPC:
    """`ipc`: handles travel; the sender's memory is read where it is."""

    from_every_rank = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._held: list[Bucket] = []  # a handle is good for as long as its memory is

    def send(self, bucket: Bucket) -> dict[str, tuple[Any, Any]]:
        """By name, the function that opens a handle, and its arguments."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()
        self._held = [*self._held[-1:], bucket]
        return {name: reduce_tensor(tensor) for name, tensor in bucket.items()}

    def receive(self, sent: dict[str, tuple[Any, Any]]) -> Bucket:
        """Tensors that lie in the sender's memory."""
        return {name: rebuild(*arguments) for name, (rebuild, arguments) in sent.items()}

    def finish(self) -> None:
        """Lets the last buckets go."""
        self._held = []


class Broadcast:
    """`broadcast`: the layout travels in the call, the bytes in a collective of all ends."""

    from_every_rank = False

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.device, self.channel = device, channel
        host, port = channel.address
        timeout = timedelta(seconds=channel.timeout_s)
        store = torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        own = torch.distributed.PrefixStore(channel.name, store)
        self._group: Any  # None once an end is lost
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = torch.distributed.ProcessGroupNCCL(own, channel.rank, channel.size, options)
        else:
            with own_interface():
                self._group = torch.distributed.ProcessGroupGloo(own, channel.rank, channel.size, timeout)
        self._on_the_way: list[tuple[Any, Tensor]] = []

    def send(self, bucket: Bucket) -> Layout | Packed:
        """Starts the collective and returns at once: the receivers join when the layout has reached them.

        As `shared` once an end is lost.
        """
        self.finish()
        if self._group is None:
            return ObjectStore().send(bucket)
        layout = Layout.of(bucket)
        flat = layout.pack(bucket, self.device)
        self._on_the_way = [(self._group.broadcast(flat, 0), flat)]
        return layout

    def receive(self, sent: Layout) -> Bucket:
        """Joins the collective."""
        if self._group is None:
            raise Missed("an end of the broadcast was lost before")
        flat = torch.empty(sent.size, dtype=torch.uint8, device=self.device)
        try:
            self._group.broadcast(flat, 0).wait()
        except RuntimeError as error:
            self._group = None  # which ends the wait of the others
            raise Missed(str(error)) from error
        return sent.unpack(flat)

    def finish(self) -> None:
        """Waits for what was sent last, as far as it can still arrive."""
        on_the_way, self._on_the_way = self._on_the_way, []
        try:
            for work, _ in on_the_way:
                work.wait()
        except RuntimeError:
            self._group = None


def receive(sent: Sent, transport: Transport) -> Bucket:
    """The tensors of a bucket: what came in the call, or by the transport."""
    return sent.content.unpack() if isinstance(sent.content, Packed) else transport.receive(sent.content)


def open_transport(channel: Channel, device: torch.device) -> Transport:
    """One end of a channel, in a process whose models are on `device`. With `broadcast` all ends must open at once."""
    if channel.transport == "broadcast":
        return Broadcast(channel, device)
    return CudaIPC() if channel.transport == "ipc" else ObjectStore()


def choose_transport(wanted: str, nodes: Sequence[str], on_gpu: bool, partners: Sequence[int | None]) -> str:
    """What `trainer.weight_transport` means; auto picks the cheapest that works.

    Args:
        nodes: of the trainer's first rank and of every replica.
        partners: by replica, the trainer's rank on the same device; None where there is none.

    Raises:
        ConfigError: what is wanted cannot work with this placement.
    """
    if wanted == "auto":
        if on_gpu and None not in partners:
            return "ipc"
        one_host = len(set(nodes)) == 1
        return "shared" if (0 in partners if on_gpu else one_host) else "broadcast"
    if wanted == "ipc" and (not on_gpu or None in partners):
        raise ConfigError(
            "trainer.weight_transport=ipc needs an actor rank on the GPU of every rollout replica. Set placement=colocated "
            "with actor.ranks of at least rollout.replicas, or trainer.weight_transport=auto"
        )
    if wanted == "broadcast" and on_gpu and 0 in partners:
        raise ConfigError(
            "trainer.weight_transport=broadcast needs a GPU for each of its ends, but the actor's first rank and a rollout "
            "replica share one. Set placement=split, or trainer.weight_transport=auto"
        )
    return wanted
