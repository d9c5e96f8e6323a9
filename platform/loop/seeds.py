"""Independent random streams from a few integers, the same on every machine and in every process."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Combines integers, in order, into a seed in [0, 2^63). Similar inputs give unrelated seeds (SplitMix64 finaliser)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
