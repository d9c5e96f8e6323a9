"""Checksums that are the same in every process, whatever its thread count."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 65_521  # prime; the weight of an element depends on its position


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of the bits of a tensor and their positions. Equal tensors of one dtype have equal checksums.

    Uses integer arithmetic modulo 2^64, so the order of summation cannot change the result.
    """
    bits = tensor.detach().contiguous().view(_AS_INTEGER[tensor.element_size()]).flatten()
    places = torch.arange(bits.numel(), device=bits.device) % _WEIGHTS + 1
    return int((bits.to(torch.int64) * places).sum())


def combined(checksums: Mapping[str, int]) -> str:
    """A digest of named checksums. It changes with any checksum, and does not depend on their order."""
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()[:16]
