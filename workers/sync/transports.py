"""Transports that carry a bucket of weights from the trainer to the rollout replicas.

    shared     Ray's object store: shared memory on one host, a copy over the network to other hosts
    ipc        CUDA IPC handles, without a copy: each trainer rank sends to the replica on its own GPU
    broadcast  one collective for all replicas, for several hosts: NCCL between GPUs, gloo between CPUs

A transport has two ends: `send` returns the content of the Ray call, and `receive` turns it into tensors. With shared and
broadcast, only the trainer's first rank sends.

If one end of a broadcast dies, the collective is lost for all ends, but no end hangs or fails: the sender then sends the
bytes in the calls, and a receiver reports the bucket that it missed.
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
    """The arguments with which one end opens its transport."""

    transport: str
    rank: int = 0  # 0: the sender
    size: int = 1
    address: tuple[str, int] = ("", 0)  # of a store that all ends can reach
    name: str = ""  # unique for every set of ends
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Sent:
    """A bucket as it travels."""

    content: Any  # the result of the transport's `send`
    verify: bool  # whether both ends compute checksums


class Missed(RuntimeError):
    """A bucket did not arrive, because another end of the broadcast died."""


class Transport(Protocol):
    """One end of a transport."""

    device: torch.device
    """The device on which the sender's tensors must be."""
    from_every_rank: bool
    """Whether each trainer rank sends to the replica on its own device; if not, the first rank sends to all replicas."""

    def send(self, bucket: Bucket) -> Any:
        """Returns the content for the receivers. The tensors must not change until the next call."""
        ...

    def receive(self, sent: Any) -> Bucket:
        """The tensors of a bucket.

        Raises:
            Missed: they can no longer arrive.
        """
        ...

    def finish(self) -> None:
        """Waits until every bucket that was sent has arrived or is lost."""
        ...


@dataclass(frozen=True)
class Layout:
    """The position of each tensor of a bucket in one buffer of bytes."""

    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]  # name, dtype, shape, first byte, bytes
    size: int

    @staticmethod
    def of(bucket: Bucket) -> Layout:
        """Places the tensors one after another, each aligned to 16 bytes, which suits every dtype."""
        tensors, offset = [], 0
        for name, tensor in bucket.items():
            size = tensor.numel() * tensor.element_size()
            tensors.append((name, tensor.dtype, tuple(tensor.shape), offset, size))
            offset += -(-size // 16) * 16
        return Layout(tensors, offset)

    def pack(self, bucket: Bucket, device: torch.device) -> Tensor:
        """Copies the tensors into one buffer, (size,) uint8, on `device`."""
        flat = torch.empty(self.size, dtype=torch.uint8, device=device)
        for name, dtype, shape, offset, size in self.tensors:
            if size:
                flat[offset : offset + size].view(dtype).view(shape).copy_(bucket[name])
        return flat

    def unpack(self, flat: Tensor) -> Bucket:
        """The tensors as views of the buffer `flat`, (size,) uint8."""
        return {
            name: flat[offset : offset + size].view(dtype).view(shape) for name, dtype, shape, offset, size in self.tensors
        }


@dataclass(frozen=True)
class Packed:
    """A bucket as one buffer of bytes."""

    layout: Layout
    content: NDArray[np.uint8]  # Ray sends an array as one block

    def unpack(self) -> Bucket:
        """The tensors as read-only views."""
        return self.layout.unpack(torch.from_numpy(self.content))


class ObjectStore:
    """`shared`: the bytes travel in the call; receivers on the sender's host read them in place."""

    device = CPU
    from_every_rank = False

    def send(self, bucket: Bucket) -> Packed:
        """Packs all tensors into one array, which Ray copies once, into shared memory."""
        layout = Layout.of(bucket)
        return Packed(layout, layout.pack(bucket, CPU).numpy())

    def receive(self, sent: Packed) -> Bucket:
        """The tensors, which must not be written to."""
        return sent.unpack()

    def finish(self) -> None:
        """Does nothing: when a call returns, its bucket has arrived."""


class CudaIPC:
    """`ipc`: handles travel in the call; receivers read the sender's memory."""

    from_every_rank = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._held: list[Bucket] = []  # keeps the memory behind the handles allocated

    def send(self, bucket: Bucket) -> dict[str, tuple[Any, Any]]:
        """By tensor name: (function that opens the handle, its arguments)."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()
        self._held = [*self._held[-1:], bucket]
        return {name: reduce_tensor(tensor) for name, tensor in bucket.items()}

    def receive(self, sent: dict[str, tuple[Any, Any]]) -> Bucket:
        """The tensors, in the sender's memory."""
        return {name: rebuild(*arguments) for name, (rebuild, arguments) in sent.items()}

    def finish(self) -> None:
        """Releases the last buckets."""
        self._held = []


class Broadcast:
    """`broadcast`: the layout travels in the call, and the bytes in a collective of all ends."""

    from_every_rank = False

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.device, self.channel = device, channel
        host, port = channel.address
        timeout = timedelta(seconds=channel.timeout_s)
        store = torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        own = torch.distributed.PrefixStore(channel.name, store)
        self._group: Any  # None after an end has died
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = torch.distributed.ProcessGroupNCCL(own, channel.rank, channel.size, options)
        else:
            with own_interface():
                self._group = torch.distributed.ProcessGroupGloo(own, channel.rank, channel.size, timeout)
        self._on_the_way: list[tuple[Any, Tensor]] = []

    def send(self, bucket: Bucket) -> Layout | Packed:
        """Starts the collective and returns at once; receivers join when the layout reaches them.

        After an end has died, sends the bytes in the call, as `shared` does.
        """
        self.finish()
        if self._group is None:
            return ObjectStore().send(bucket)
        layout = Layout.of(bucket)
        flat = layout.pack(bucket, self.device)
        self._on_the_way = [(self._group.broadcast(flat, 0), flat)]
        return layout

    def receive(self, sent: Layout) -> Bucket:
        """Joins the collective and returns its tensors."""
        if self._group is None:
            raise Missed("an end of the broadcast was lost before")
        flat = torch.empty(sent.size, dtype=torch.uint8, device=self.device)
        try:
            self._group.broadcast(flat, 0).wait()
        except RuntimeError as error:
            self._group = None  # closes the group, which ends the wait of the other ends
            raise Missed(str(error)) from error
        return sent.unpack(flat)

    def finish(self) -> None:
        """Waits until the last bucket has arrived or is lost."""
        on_the_way, self._on_the_way = self._on_the_way, []
        try:
            for work, _ in on_the_way:
                work.wait()
        except RuntimeError:
            self._group = None


def receive(sent: Sent, transport: Transport) -> Bucket:
    """The tensors of a bucket, from the call itself or from the transport."""
    return sent.content.unpack() if isinstance(sent.content, Packed) else transport.receive(sent.content)


def open_transport(channel: Channel, device: torch.device) -> Transport:
    """Opens one end of a channel for models on `device`. With `broadcast`, all ends must open at the same time."""
    if channel.transport == "broadcast":
        return Broadcast(channel, device)
    return CudaIPC() if channel.transport == "ipc" else ObjectStore()


def choose_transport(wanted: str, nodes: Sequence[str], on_gpu: bool, partners: Sequence[int | None]) -> str:
    """The transport for the setting `trainer.weight_transport`; auto selects the cheapest one that works.

    Args:
        nodes: the nodes of the trainer's first rank and of each replica.
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
