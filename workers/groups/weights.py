"""How weights get from the trainer's ranks to the rollout replicas: the state of this connection, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.workers.groups.ranks import Ranks
from tandem.workers.sync.transports import Channel


@dataclass
class WeightChannel:
    """The transport of a run's weights, shared by the actor group that sends and the rollout group that receives.

    While it is closed, weights travel inside the calls, through Ray's object store. The transport `shared` never opens it.

    Args:
        transport: as `trainer.weight_transport` was resolved.
        senders: by replica, the trainer rank that sends its weights.
    """

    transport: str = "shared"
    senders: Sequence[int] = ()
    is_open: bool = field(default=False, init=False)
    _openings: int = field(default=0, init=False)  # each needs a name of its own

    def sender_of(self, replica: int) -> int:
        """The trainer rank that sends the weights of a replica."""
        return self.senders[replica] if self.senders else 0

    def open(self, trainer: Ranks, replicas: Ranks) -> None:
        """Connects the sending trainer ranks with all replicas; does nothing if open, or if there is nothing to connect.

        Raises:
            WorkerFailed: an end did not open; WorkerDied if its process ended.
        """
        if self.is_open or self.transport == "shared":
            return
        self._openings += 1
        [address] = trainer.wait("address", [trainer.handles[0].address.remote()])
        # A quarter of the time of a call: an end that is lost is noticed before the calls that wait for it are given up.
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
        """Sends weights inside the calls until the channel is opened again."""
        self.is_open = False
