"""What rollout engines share: the form of a response, and which tokens end one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.platform.batch import StopReason


@dataclass
class Sampled:
    """One response as an engine returns it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason = StopReason.LENGTH


def end_token_ids(*sources: Any) -> set[int]:
    """The ids that end a response by what generation configs, model configs and tokenizers call their end token."""
    found = [getattr(source, "eos_token_id", None) for source in sources]
    flat = [token for one in found for token in (one if isinstance(one, list) else [one])]
    return {int(token) for token in flat if token is not None}
