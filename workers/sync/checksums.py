"""Checks that weights arrived as they were sent."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.platform.loop.protocols import WeightSyncError


def compare_checksums(sent: Mapping[str, int], arrived: Mapping[str, int], who: str) -> None:
    """Compares the checksums of the tensors that were sent with those of the tensors that arrived.

    Raises:
        WeightSyncError: names the first tensor that is missing, unexpected or different.
    """
    for name in sorted(sent.keys() | arrived.keys()):
        if name not in arrived or name not in sent:
            raise WeightSyncError(f"{who}: tensor {name} was {'sent' if name in sent else 'received'} on one side only")
        if sent[name] != arrived[name]:
            raise WeightSyncError(f"{who}: tensor {name} has checksum {arrived[name]}, but {sent[name]} was sent")
