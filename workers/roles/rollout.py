"""The rollout role: a sampling engine, and the conversion of its responses to rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tandem.platform.config.schema import ConfigError, ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt, Rollout, StopReason
from tandem.platform.loop.protocols import Sampling
from tandem.workers.cluster.runtime import Rank, peak_memory_bytes, set_up, use_threads
from tandem.workers.engines.completion import Sampled
from tandem.workers.engines.continuation import Continuation
from tandem.workers.engines.hf import HFEngine
from tandem.workers.engines.vllm import VLLMEngine
from tandem.workers.models.footprint import baseline_bytes
from tandem.workers.sync.transports import Channel, Missed, ObjectStore, Sent, Transport, open_transport, receive


class RolloutBackend(Protocol):
    """A sampling engine."""

    continuous: ClassVar[bool]  # whether calls from several threads run in one batch; otherwise they take turns
    tokenizer: Any
    stop_ids: set[int]  # tokens that end a response

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sampled]:
        """The samples in order of the prompts, those of one prompt adjacent. Thread-safe."""
        ...

    def load_weights(self, bucket: dict[str, Tensor], verify: bool = True) -> dict[str, int]:
        """Takes new values for some weights; with `verify`, returns their checksums as stored in the engine.

        No token may be sampled from a mix of old and new weights: the engine either stops sampling from the first call
        until `finish_weights`, or applies all weights in `finish_weights`.
        """
        ...

    def finish_weights(self) -> None:
        """Completes the update: applies weights that were held back, and drops caches computed with the old weights."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache: the maximum so far."""
        ...

    def sleep(self) -> None:
        """Frees device memory for other roles until `wake`."""
        ...

    def wake(self, what: str) -> None:
        """Reclaims memory: first for "weights", which can then be loaded, afterwards for "cache"."""
        ...


ENGINES: dict[str, Any] = {"hf": HFEngine, "vllm": VLLMEngine}
"""Engines by their name in `rollout.engine`. A new engine takes a file and a line here; the contract tests cover it."""


def engine_name(asked: str, on_gpu: bool) -> str:
    """The engine for `rollout.engine=asked`: auto means vllm on CUDA if it is installed, otherwise hf.

    Raises:
        ConfigError: vllm is asked for and not installed.
    """
    installed = find_spec("vllm") is not None
    if asked == "vllm" and not installed:
        extra = "gpu" if on_gpu else "cpu"
        raise ConfigError(
            f"rollout.engine=vllm, but vLLM is not installed here. Install it, `pip install 'tandem-rl[{extra}]'` or "
            f"`pip install --editable '.[{extra}]'` in a checkout, or set rollout.engine=hf"
        )
    if asked != "auto":
        return asked
    return "vllm" if on_gpu and installed else "hf"


@dataclass(frozen=True)
class RolloutSpec:
    """The settings of a rollout replica."""

    path: str
    model: ModelConfig
    rollout: RolloutConfig
    token_ends: bool = False  # whether rollouts record where in the text their tokens end


class RolloutWorker:
    """One replica of the rollout role."""

    def __init__(self, spec: RolloutSpec, rank: Rank) -> None:
        self.spec, self.rank, self.version = spec, rank, 0
        self.device: torch.device = set_up(rank)
        self._arrived: dict[str, int] = {}
        self._baseline = 0
        self._transport: Transport = ObjectStore()

    def start(self) -> None:
        """Loads the model into the engine."""
        spec = self.spec
        use_threads(self.rank)
        name = engine_name(spec.rollout.engine, self.device.type == "cuda")
        self.engine: RolloutBackend = ENGINES[name](spec.path, spec.model, spec.rollout, self.device)
        self._baseline = baseline_bytes(self.device, held=self.engine.weight_bytes())

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """The samples in order of the prompts, those of one prompt adjacent, with the version of the weights."""
        use_threads(self.rank)  # Ray calls from several threads, and OpenMP keeps a thread count for each
        version = self.version  # of the oldest weights used, in case new weights arrive meanwhile
        sampled = self.engine.generate(prompts, sampling)
        owners = [(prompt, self._after(prompt)) for prompt in prompts]
        owners = [owner for owner in owners for _ in range(sampling.samples)]
        return [
            self._rollout(prompt, response, version, after)
            for (prompt, after), response in zip(owners, sampled, strict=True)
        ]

    def open_channel(self, channel: Channel) -> None:
        """Opens the receiving end; with `broadcast`, returns once every end is open."""
        self._transport = open_transport(channel, self.device)

    def load_weights(self, sent: Sent) -> bool:
        """Takes one bucket of new weights; False if it was lost, and all buckets must be sent again."""
        try:
            bucket = receive(sent, self._transport)
        except Missed:
            return False
        self._arrived |= self.engine.load_weights(bucket, sent.verify)
        return True

    def finish_weights(self, version: int) -> dict[str, int]:
        """Completes the weight update; returns the checksum of every tensor that arrived."""
        use_threads(self.rank)
        self.engine.finish_weights()
        self.version = version
        arrived, self._arrived = self._arrived, {}
        return arrived

    def sleep(self) -> None:
        """Frees device memory for other roles until `wake`."""
        self.engine.sleep()

    def wake(self, what: str) -> None:
        """Reclaims memory: first for "weights", then, once they are loaded, for "cache"."""
        self.engine.wake(what)

    def memory(self) -> dict[str, int]:
        """Bytes of this replica by kind, and the peak of this process."""
        return {
            "weights": self.engine.weight_bytes(),
            "gradients": 0,
            "optimizer": 0,
            "cache": self.engine.cache_bytes(),
            "baseline": self._baseline,
            "peak": peak_memory_bytes(self.device),
        }

    def _after(self, prompt: Prompt) -> Continuation:
        skip = not self.spec.rollout.keep_special_tokens
        return Continuation(partial(self.engine.tokenizer.decode, skip_special_tokens=skip), prompt.ids)

    def _rollout(self, prompt: Prompt, sampled: Sampled, version: int, after: Continuation | None = None) -> Rollout:
        keep = self.spec.rollout.keep_special_tokens
        # A stop token is never part of the text, even if the tokenizer does not treat it as special. A stop string is.
        ended = sampled.stop is StopReason.STOP and sampled.ids[-1] in self.engine.stop_ids and not keep
        written = sampled.ids[:-1] if ended else sampled.ids
        after = after or self._after(prompt)
        text = after(written)
        ends = token_ends(after, written, text) + ([len(text)] if ended else []) if self.spec.token_ends else []
        return Rollout(
            prompt=prompt,
            response_ids=tuple(sampled.ids),
            response_mask=(True,) * len(sampled.ids),
            logprobs=tuple(sampled.logprobs),
            stop=sampled.stop,
            policy_version=version,
            response_text=text,
            token_ends=tuple(ends),
        )


def token_ends(decode: Callable[[list[int]], str], ids: list[int], text: str) -> list[int]:
    """For each token, the number of characters of `text` up to its end. `text` is the decoded `ids`.

    The counts never decrease and the last is `len(text)`. Each prefix is decoded as a whole, because a token's text can
    depend on the tokens before it. A character that spans several tokens counts from its first token on.
    """
    lengths = [min(len(decode(ids[:count])), len(text)) for count in range(1, len(ids) + 1)]
    return list(accumulate(lengths, max))
