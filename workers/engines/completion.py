"""The response type that all rollout engines share."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.platform.experience.batch import StopReason


@dataclass
class Sampled:
    """One sampled response."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason = StopReason.LENGTH
