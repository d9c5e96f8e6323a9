"""The rollout role: one engine, and what turns its answers into rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.platform.batch import Prompt, Rollout, StopReason
from tandem.platform.config import ModelConfig, RolloutConfig
from tandem.platform.protocols import Sampling
from tandem.workers.hf_engine import HFEngine, Sampled
from tandem.workers.runtime import Rank, peak_memory_bytes, set_up
from tandem.workers.sync import Channel, ObjectStore, Sent, Transport, open_transport


class RolloutBackend(Protocol):
    """An engine that samples."""

    tokenizer: Any

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sampled]:
        """The samples of each prompt side by side, in order of the prompts."""
        ...

    def load_weights(self, bucket: dict[str, Tensor]) -> dict[str, int]:
        """Takes new values of some weights; returns the checksum of each as it stands in the engine."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        ...


ENGINES: dict[str, Any] = {"hf": HFEngine}
"""By the name used in `rollout.engine`. An engine is one file, one line here, one parameter of the contract tests."""


@dataclass(frozen=True)
class RolloutSpec:
    """What a rollout replica is made from."""

    path: str
    model: ModelConfig
    rollout: RolloutConfig
    token_ends: bool = False  # whether rollouts say where in the text their tokens end


class RolloutWorker:
    """One replica of the rollout role."""

    def __init__(self, spec: RolloutSpec, rank: Rank) -> None:
        self.spec, self.version = spec, 0
        self.device: torch.device = set_up(rank)
        self._arrived: dict[str, int] = {}
        self._transport: Transport = ObjectStore()

    def start(self) -> None:
        """Loads the model into the engine."""
        spec = self.spec
        self.engine: RolloutBackend = ENGINES[spec.rollout.engine](spec.path, spec.model, spec.rollout, self.device)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """The samples of each prompt side by side, in order of the prompts, marked with the version of the weights."""
        sampled = self.engine.generate(prompts, sampling)
        owners = [prompt for prompt in prompts for _ in range(sampling.samples)]
        return [self._rollout(prompt, one) for prompt, one in zip(owners, sampled, strict=True)]

    def open_channel(self, channel: Channel) -> None:
        """Opens the receiving end; with `broadcast`, returns once all ends have."""
        self._transport = open_transport(channel, self.device)

    def load_weights(self, sent: Sent, shared: bool = False) -> None:
        """Takes one part of new weights; `shared`: it came in the call, whatever transport is open."""
        bucket = (ObjectStore() if shared else self._transport).receive(sent.content)
        arrived = self.engine.load_weights(bucket)
        if sent.verify:
            self._arrived |= arrived

    def finish_weights(self, version: int) -> dict[str, int]:
        """Declares the weights complete; returns the checksum of every tensor that arrived."""
        self.version = version
        arrived, self._arrived = self._arrived, {}
        return arrived

    def memory(self) -> dict[str, int]:
        """Bytes of this replica by kind, and the peak of its process."""
        weights = self.engine.weight_bytes()
        return {"weights": weights, "gradients": 0, "optimizer": 0, "peak": peak_memory_bytes(self.device)}

    def _rollout(self, prompt: Prompt, sampled: Sampled) -> Rollout:
        keep = self.spec.rollout.keep_special_tokens
        # The stop token is not part of the text, whether or not the tokenizer calls it special.
        ended = sampled.stop is StopReason.STOP and not keep
        written = sampled.ids[:-1] if ended else sampled.ids
        decode = partial(self.engine.tokenizer.decode, skip_special_tokens=not keep)
        text = decode(written)
        ends = token_ends(decode, written, text) + ([len(text)] if ended else []) if self.spec.token_ends else []
        return Rollout(
            prompt=prompt,
            response_ids=tuple(sampled.ids),
            response_mask=(True,) * len(sampled.ids),
            logprobs=tuple(sampled.logprobs),
            stop=sampled.stop,
            policy_version=self.version,
            response_text=text,
            token_ends=tuple(ends),
        )


def token_ends(decode: Callable[[list[int]], str], ids: list[int], text: str) -> list[int]:
    """Characters of `text`, which `ids` decode to, up to and with each token: never falling, the last one all of them.

    Prefixes are decoded, since what a token stands for may depend on those before it. A character that several tokens
    make up counts from the first of them on.
    """
    lengths = [min(len(decode(ids[:count])), len(text)) for count in range(1, len(ids) + 1)]
    return list(accumulate(lengths, max))
