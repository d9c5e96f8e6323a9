"""Estimates a role's peak memory by running its computation on fake tensors, which have shapes but no data.

The real code of the model and of the roles runs: forward, loss, backward, sampling. Nothing is computed or allocated, but
every tensor is counted from creation to release, as torch's allocator would. The estimate therefore includes whatever a
model family keeps or recomputes. The fake tensors are on the CPU even when the run uses a GPU, because CUDA fake tensors
would make torch allocate GPU memory in a process that needs none. `benchmarks/memory_plan.py` compares these estimates with
measured peaks.
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
"""Kernels with a workspace of their own: its size as a multiple of the bytes of their first argument."""

CPU = torch.device("cpu")
Make = Callable[[], Any]
"""Creates the model; the values of its weights do not matter."""


class Unknown(RuntimeError):
    """A role's computation cannot run on fake tensors; the message says why."""


class Held(TorchDispatchMode):
    """Counts the bytes of all live tensors that were created inside the context."""

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
            workspace = INSIDE[function] * args[0].numel() * args[0].element_size()
            self.peak = max(self.peak, self.live + int(workspace))
        return result

    def begin(self) -> int:
        """Resets the peak; returns the bytes that are live."""
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
    """Peak bytes of a rank's largest micro-batch, not counting weights, gradients and optimizer.

    Args:
        spec: of the actor, the critic or the reference. make: creates its model. rows, width: of the micro-batch, in
            sequences and tokens. train: whether to measure an update; otherwise a pass without gradients.

    Raises:
        Unknown: the model's code reads the values of a tensor, or uses an operation that fake tensors do not support.
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
        for parameter in model.parameters():  # micro-batches after the first add to existing gradients
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
    """Peak bytes of the `hf` engine, not counting weights: the larger of prefill and the last token of the longest
    responses, each with cache and logits.

    Args:
        prompts, rows: in one batch; a prompt has a row per sample. lengths: the longest prompt and response, in tokens.

    Raises:
        Unknown: as `working_bytes`.
    """
    with _rehearsing() as held, torch.no_grad():
        model = make().eval()
        start = held.begin()
        longest = [Prompt((0,) * lengths[0], number, "") for number in range(prompts)]
        wanted = [(longest[row * prompts // rows], row) for row in range(rows)]
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
    """Appends this many tokens to the cache in one pass."""
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
    """A micro-batch of `rows` sequences of `width` tokens, with every field set."""
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
    """Runs the body on fake tensors and counts them.

    Raises:
        Unknown: anything that the body raises.
    """
    held = Held()
    try:
        with FakeTensorMode(), held:
            yield held
    except Exception as error:  # the model's code can raise anything
        raise Unknown(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
