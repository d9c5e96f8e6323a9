"""The connection that carries weights from the trainer's ranks to the rollout replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.workers.groups.ranks import Ranks
from tandem.workers.sync.transports import Channel


@dataclass
class WeightChannel:
    """The transport of a run's weights, shared by the actor group that sends and the rollout group that receives.

    While the channel is closed, weights travel inside the Ray calls, through Ray's object store. With `shared` as its
    transport, the channel never opens.

    Args:
        transport: the transport that `choose_transport` has chosen.
        senders: for each replica, the trainer rank that sends its weights.
    """

    transport: str = "shared"
    senders: Sequence[int] = ()
    is_open: bool = field(default=False, init=False)
    _openings: int = field(default=0, init=False)  # makes the name of each opening unique

    def sender_of(self, replica: int) -> int:
        """The trainer rank that sends the weights of a replica."""
        return self.senders[replica] if self.senders else 0

    def open(self, trainer: Ranks, replicas: Ranks) -> None:
        """Connects the sending trainer ranks with all replicas, unless the channel is open or the transport is `shared`.

        Raises:
            WorkerFailed: an end did not open; WorkerDied if its process ended.
        """
        if self.is_open or self.transport == "shared":
            return
        self._openings += 1
        [address] = trainer.wait("address", [trainer.handles[0].address.remote()])
        # A quarter of the deadline of a call, so a lost end is noticed before the calls that wait for it time out.
        timeout_s, size = replicas.timeout_s / 4, 1 + len(replicas)
        channel = Channel(self.transport, 0, size, address, f"weights-{self._openings}", timeout_s)
        sending = trainer.handles[: 1 + max(self.senders, default=0)]
        senders = [handle.open_channel.remote(channel) for handle in sending]
        ends = [replace(channel, rank=number + 1) for number in range(len(replicas))]
        receivers = [handle.open_channel.remote(end) for handle, end in zip(replicas.handles, ends, strict=True)]
        replicas.wait("open_channel", receivers)
        trainer.wait("open_channel", senders)
        self.is_open = True

    def close(self) -> None:
        """Makes weights travel inside the Ray calls until the channel is opened again."""
        self.is_open = False
