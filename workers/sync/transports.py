"""Transports that move a bucket of weights from the trainer to the rollout replicas.

    shared     through Ray's object store: shared memory on one host, a copy over the network to other hosts
    ipc        CUDA IPC handles without a copy: each replica shares a GPU with a trainer rank
    broadcast  one collective for all replicas: NCCL between GPUs, gloo between CPUs; for several hosts

With `ipc`, every trainer rank sends to the replica on its GPU. Otherwise the first trainer rank sends to all replicas.

A transport has two ends: `send` returns the payload of a Ray call, and `receive` turns the payload into tensors.

If one end of a `broadcast` dies, the collective is lost for all ends, but the run continues: the sender puts later buckets
into the Ray calls, and a receiver reports that it missed a bucket.
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
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # true of all arrays in Ray's shared memory
Bucket = dict[str, Tensor]


@dataclass(frozen=True)
class Channel:
    """What one end needs to open its transport."""

    transport: str
    rank: int = 0  # 0: the sender
    size: int = 1
    address: tuple[str, int] = ("", 0)  # host and port of a store that all ends can reach
    name: str = ""  # unique for each set of ends
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Sent:
    """A bucket in transit."""

    content: Any  # the result of the transport's `send`
    verify: bool  # whether both ends compute checksums


class Missed(RuntimeError):
    """A bucket did not arrive because an end of the broadcast is gone."""


class Transport(Protocol):
    """One end of a connection for weights."""

    device: torch.device
    """Where the sender's tensors must be."""
    from_every_rank: bool
    """Whether every trainer rank sends to the replica on its own device; otherwise the first rank sends to all replicas."""

    def send(self, bucket: Bucket) -> Any:
        """The payload for the receivers; the tensors must not change until the next call."""
        ...

    def receive(self, sent: Any) -> Bucket:
        """The tensors of a bucket; raises Missed if they can no longer arrive."""
        ...

    def finish(self) -> None:
        """Returns when no bucket is in transit."""
        ...


@dataclass(frozen=True)
class Layout:
    """The positions of a bucket's tensors in one contiguous array of bytes."""

    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]  # name, dtype, shape, first byte, bytes
    size: int

    @staticmethod
    def of(bucket: Bucket) -> Layout:
        """Places the tensors one after the other, each aligned to 16 bytes, which suits every dtype."""
        tensors, offset = [], 0
        for name, tensor in bucket.items():
            size = tensor.numel() * tensor.element_size()
            tensors.append((name, tensor.dtype, tuple(tensor.shape), offset, size))
            offset += -(-size // 16) * 16
        return Layout(tensors, offset)

    def pack(self, bucket: Bucket, device: torch.device) -> Tensor:
        """The tensors of a bucket as one (size,) uint8 tensor."""
        flat = torch.empty(self.size, dtype=torch.uint8, device=device)
        for name, dtype, shape, offset, size in self.tensors:
            if size:
                flat[offset : offset + size].view(dtype).view(shape).copy_(bucket[name])
        return flat

    def unpack(self, flat: Tensor) -> Bucket:
        """The tensors of a bucket, as views of `flat`."""
        return {
            name: flat[offset : offset + size].view(dtype).view(shape) for name, dtype, shape, offset, size in self.tensors
        }


@dataclass(frozen=True)
class Packed:
    """A bucket as one contiguous array of bytes."""

    layout: Layout
    content: NDArray[np.uint8]  # Ray transfers NumPy arrays without pickling their content

    def unpack(self) -> Bucket:
        """The tensors, as read-only views."""
        return self.layout.unpack(torch.from_numpy(self.content))


class ObjectStore:
    """`shared`: the bytes travel in the Ray call. On the sender's host they are read without a copy."""

    device = CPU
    from_every_rank = False

    def send(self, bucket: Bucket) -> Packed:
        """All tensors in one array, which Ray copies once into shared memory."""
        layout = Layout.of(bucket)
        return Packed(layout, layout.pack(bucket, CPU).numpy())

    def receive(self, sent: Packed) -> Bucket:
        """Read-only tensors."""
        return sent.unpack()

    def finish(self) -> None:
        """Does nothing: when a Ray call has returned, its bucket has arrived."""


class CudaIPC:
    """`ipc`: handles travel in the Ray call; the receiver reads the sender's memory directly."""

    from_every_rank = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._held: list[Bucket] = []  # a handle is valid only while its memory is allocated

    def send(self, bucket: Bucket) -> dict[str, tuple[Any, Any]]:
        """For each tensor's name, the function that opens its handle, and the function's arguments."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()
        self._held = [*self._held[-1:], bucket]
        return {name: reduce_tensor(tensor) for name, tensor in bucket.items()}

    def receive(self, sent: dict[str, tuple[Any, Any]]) -> Bucket:
        """Tensors in the sender's memory."""
        return {name: rebuild(*arguments) for name, (rebuild, arguments) in sent.items()}

    def finish(self) -> None:
        """Releases the last buckets."""
        self._held = []


class Broadcast:
    """`broadcast`: the layout travels in the Ray call, the bytes in a collective of all ends."""

    from_every_rank = False

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.device, self.channel = device, channel
        host, port = channel.address
        timeout = timedelta(seconds=channel.timeout_s)
        store = torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        channel_store = torch.distributed.PrefixStore(channel.name, store)
        self._group: Any  # None once an end is lost
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = torch.distributed.ProcessGroupNCCL(channel_store, channel.rank, channel.size, options)
        else:
            with own_interface():
                self._group = torch.distributed.ProcessGroupGloo(channel_store, channel.rank, channel.size, timeout)
        self._on_the_way: list[tuple[Any, Tensor]] = []

    def send(self, bucket: Bucket) -> Layout | Packed:
        """Starts the collective and returns at once; each receiver joins when it has the layout.

        Once an end is lost, sends as `shared` does.
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
            self._group = None  # closes the connections, which ends the wait of the other ends
            raise Missed(str(error)) from error
        return sent.unpack(flat)

    def finish(self) -> None:
        """Waits until the last bucket has been sent, or until an end turns out to be lost."""
        on_the_way, self._on_the_way = self._on_the_way, []
        try:
            for work, _ in on_the_way:
                work.wait()
        except RuntimeError:
            self._group = None


def receive(sent: Sent, transport: Transport) -> Bucket:
    """The tensors of a bucket, which arrived in the Ray call or by the transport."""
    return sent.content.unpack() if isinstance(sent.content, Packed) else transport.receive(sent.content)


def open_transport(channel: Channel, device: torch.device) -> Transport:
    """Opens one end of a channel in a process whose models are on `device`; `broadcast` ends must all open together."""
    if channel.transport == "broadcast":
        return Broadcast(channel, device)
    return CudaIPC() if channel.transport == "ipc" else ObjectStore()


def choose_transport(wanted: str, nodes: Sequence[str], on_gpu: bool, partners: Sequence[int | None]) -> str:
    """The transport that `trainer.weight_transport` selects; auto picks the cheapest that works.

    Args:
        nodes: the nodes of the trainer's first rank and of every replica.
        partners: for each replica, the trainer rank on the same device, or None.

    Raises:
        ConfigError: the wanted transport cannot work with this placement.
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
