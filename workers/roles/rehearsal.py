"""Rehearses what a role computes, on tensors without content: how much memory it would hold at its peak.

The model's own code runs, and that of the roles: forward, loss, backward, sampling. Nothing is computed and nothing is
allocated, but every tensor is counted from its making to its end, as torch's allocator would: whatever a family of models
keeps or makes again is in the number. The operations are those of a CPU, also in place of a GPU's: to choose those of
a GPU torch would take some of its memory, in a process that needs none. `benchmarks/memory_plan.py` compares all of this
with measured peaks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.platform.experience.batch import Prompt, RolloutBatch, TrainBatch
from tandem.workers.engines.hf import _Decoding, sample
from tandem.workers.models.loading import batch_logprobs
from tandem.workers.roles.actor import ActorSpec, actor_objective
from tandem.workers.roles.critic import CriticSpec, critic_objective, values_after
from tandem.workers.roles.reference import ReferenceSpec
from tandem.workers.roles.rollout import RolloutSpec

INSIDE: Mapping[Any, float] = {torch.ops.aten.logsumexp.default: 1.0}
"""Kernels that take memory for themselves: how many times the bytes of their first argument."""

CPU = torch.device("cpu")
Make = Callable[[], Any]
"""Makes a model anew, with whatever content."""


class Unknown(RuntimeError):
    """What a role computes cannot be rehearsed; the text says why."""


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in its body, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts what it returns."""
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        if function in INSIDE:
            own = INSIDE[function] * args[0].numel() * args[0].element_size()
            self.peak = max(self.peak, self.live + int(own))
        return result

    def begin(self) -> int:
        """Forgets the peak so far; returns the bytes that live now."""
        self.peak = self.live
        return self.live

    def _add(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = None
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.live -= size


def working_bytes(spec: Any, make: Make, rows: int, width: int, *, train: bool) -> int:
    """Bytes that a rank's largest micro-batch holds at its peak, beside weights, gradients and optimizer.

    Args:
        spec: of the actor, the critic or the reference. make: its model. rows, width: of the micro-batch, in sequences and
            tokens. train: an update; else the pass without a gradient.

    Raises:
        Unknown: the model's code asks for the content of a tensor, or does what tensors without content cannot.
    """
    assert not (train and isinstance(spec, ReferenceSpec)), "the reference is not trained"
    with _rehearsing() as held:
        model = make()
        model.train(train)
        batch = micro_batch(rows, width)
        if not train:
            start = held.begin()
            with torch.no_grad():
                _infer(spec, model, batch.rollout)
            return held.peak - start
        for parameter in model.parameters():  # micro-batches add to what the first of them has left
            parameter.grad = torch.zeros_like(parameter)
        start = held.begin()
        objective: Any = actor_objective if isinstance(spec, ActorSpec) else critic_objective
        objective(spec, model, batch).loss.backward()
        return held.peak - start


def _infer(spec: Any, model: nn.Module, batch: RolloutBatch) -> Tensor:
    if isinstance(spec, CriticSpec):
        return values_after(model, batch)
    return batch_logprobs(model, batch, spec.temperature).float()


def sampling_bytes(spec: RolloutSpec, make: Make, prompts: int, rows: int, lengths: tuple[int, int]) -> int:
    """Bytes that the `hf` engine holds at its peak beside the weights: cache and logits, when it reads prompts or when it
    writes the last token of the longest responses.

    Args:
        prompts, rows: that it runs at once, rows with all samples. lengths: the longest prompt and response, in tokens.

    Raises:
        Unknown: as `working_bytes`.
    """
    with _rehearsing() as held, torch.no_grad():
        model = make().eval()
        start = held.begin()
        one = [Prompt((0,) * lengths[0], number, "") for number in range(prompts)]
        wanted = [(one[row * prompts // rows], row) for row in range(rows)]
        state = _Decoding(model, wanted, CPU)
        _sample(spec, state.logits)
        peak = held.peak
        if lengths[1] > 1:
            _write(state, lengths[1] - 1)
            held.begin()
            state.advance(torch.zeros(rows, dtype=torch.long), torch.arange(rows))
            _sample(spec, state.logits)
        return max(peak, held.peak) - start


def _write(state: _Decoding, tokens: int) -> None:
    """As many further tokens in the cache, at once."""
    rows = len(state.mask)
    state.mask = torch.cat([state.mask, state.mask.new_ones(rows, tokens)], dim=1)
    state.logits = torch.empty(0)
    state.model(
        input_ids=torch.zeros(rows, tokens, dtype=torch.long),
        attention_mask=state.mask,
        past_key_values=state.cache,
        use_cache=True,
        logits_to_keep=1,
    )


def _sample(spec: RolloutSpec, logits: Tensor) -> None:
    uniforms = torch.zeros(len(logits), dtype=torch.float64)
    sample(logits, spec.rollout.temperature, uniforms, top_p=spec.rollout.top_p, top_k=spec.rollout.top_k)


def micro_batch(rows: int, width: int) -> TrainBatch:
    """Rows of this width that fill every field."""
    per_token, per_row = torch.zeros(rows, width), torch.zeros(rows)
    flags, numbers = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
    rollout = RolloutBatch(
        tokens=torch.zeros(rows, width, dtype=torch.long),
        response_mask=torch.zeros(rows, width, dtype=torch.bool),
        rollout_logprobs=per_token,
        lengths=numbers,
        group_ids=numbers,
        rewards=per_row,
        accuracies=per_row,
        baselines=per_row,
        scored=flags,
        muted=flags,
        truncated=flags,
        policy_version=numbers,
        token_rewards=per_token,
        step_ends=torch.zeros(rows, width, dtype=torch.bool),
    )
    return TrainBatch(
        rollout,
        per_token,
        per_token,
        ref_logprobs=per_token,
        old_values=per_token,
        returns=per_token,
        positive=flags,
        num_tokens=1,
        num_sequences=1,
    )


@contextmanager
def _rehearsing() -> Iterator[Held]:
    """The body's tensors have no content, and are counted.

    Raises:
        Unknown: whatever goes wrong with such tensors.
    """
    held = Held()
    try:
        with FakeTensorMode(), held:
            yield held
    except Exception as error:  # the code is the model's, and may do anything
        raise Unknown(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
