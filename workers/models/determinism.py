"""Turns off randomness in a model's forward pass, and checks that the model is deterministic and causal.

A policy is scored twice: in evaluation mode before an update, in training mode during it. With dropout, routing noise or
dropped layers, the ratios of the first update would not be 1, and no error would show it. A model whose attention looks
ahead would score each token with knowledge of the tokens that follow.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.batch import real_tokens

RATE = re.compile("drop|jitter", re.IGNORECASE)
"""Names of rates in the configs of transformers: attention_dropout, attn_pdrop, layerdrop, router_jitter_noise, ..."""
ROWS, TOKENS = 2, 32  # of the test batch
RANDOM_PASSES = 12  # more passes for a model that draws random numbers: layers may be dropped only rarely
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference of two passes, relative to the largest output. The kernels are the same, so most outputs are equal."""
MOST_NAMED = 5


def without_rates(config: Any) -> Any:
    """Sets every dropout and noise rate of a model config and its sub-configs to 0; returns the config."""
    _clear_rates(vars(config), lambda name, value: setattr(config, name, value))
    return config


def _clear_rates(items: Mapping[str, Any], put: Callable[[str, Any], None]) -> None:
    for name, value in list(items.items()):
        if hasattr(value, "to_diff_dict"):  # a sub-config
            without_rates(value)
        elif isinstance(value, dict):
            _clear_rates(value, value.__setitem__)
        elif not RATE.search(str(name)):
            continue
        elif _is_rate(value):
            put(name, type(value)(0))  # configs check their types
        elif isinstance(value, list | tuple) and any(map(_is_rate, value)):
            put(name, type(value)(type(item)(0) if _is_rate(item) else item for item in value))


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def disable_dropout(model: nn.Module) -> None:
    """Turns off dropout layers, including those with a rate in the code instead of the config."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0


def check_passes(model: Any, device: torch.device, what: str) -> None:
    """Refuses a model that is not causal, or whose passes over the same tokens differ within or between training and
    evaluation mode.

    Restores the model's mode, its buffers and the random generators.

    Args:
        model: a transformers model on `device`, with or without a head. what: names the model in messages.

    Raises:
        ConfigError: the model is not causal, or passes differ; names the modules that differ.
    """
    inputs = _inputs(model, device)
    with _undisturbed(model, device):
        evaluated = _outputs(model, inputs, training=False)
        before = torch.get_rng_state(), _cuda_state(device)
        trained = [_outputs(model, inputs, training=True) for _ in range(2)]
        is_random = not _equal_states(before, (torch.get_rng_state(), _cuda_state(device)))
        trained += [_outputs(model, inputs, training=True) for _ in range(RANDOM_PASSES if is_random else 0)]
        again = _outputs(model, inputs, training=False)
        problems = {
            "two passes in evaluation mode differ": _distance(evaluated, again),
            "two passes in training mode differ": max(_distance(first, second) for first, second in pairwise(trained)),
            "a pass in training mode differs from one in evaluation mode": max(_distance(evaluated, t) for t in trained),
        }
        worst = next((text for text, distance in problems.items() if not distance <= _limit(evaluated)), None)
        if worst is None:
            _check_causal(model, inputs, evaluated, what)
            return
        names = _differing(model, inputs)
    raise ConfigError(
        f"{what}: {worst} on the same tokens, by {problems[worst]:.3g} where outputs reach {_size(evaluated):.3g}. "
        "Ratios of a first update would not be 1. Modules that differ: "
        f"{', '.join(names) or 'none that torch can watch'}. Set their dropout or noise to 0 in the model's code or config"
    )


def _check_causal(model: Any, inputs: Mapping[str, Tensor], evaluated: Tensor, what: str) -> None:
    """Refuses a model whose outputs depend on later tokens: changes the last token of every row and compares the rest."""
    real = inputs["attention_mask"].bool()
    last = real.long().cumsum(1).argmax(1, keepdim=True)
    tokens, rows = inputs["input_ids"], model.get_input_embeddings().weight.shape[0]
    changed = tokens.scatter(1, last, (tokens.gather(1, last) + 1) % rows)
    before = real.scatter(1, last, False)[real]
    distance = _distance(_outputs(model, {**inputs, "input_ids": changed}, training=False)[before], evaluated[before])
    if not distance <= _limit(evaluated):
        raise ConfigError(
            f"{what} is not causal: outputs change by {distance:.3g} with the token that follows, where they reach "
            f"{_size(evaluated):.3g}. Use a decoder, or set is_decoder in the model's config if it has this setting"
        )


def _size(outputs: Tensor) -> float:
    """The largest absolute value among finite outputs."""
    finite = outputs[outputs.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _limit(outputs: Tensor) -> float:
    """The largest difference allowed between two passes."""
    return TOLERANCE.get(outputs.dtype, TOLERANCE[torch.bfloat16]) * _size(outputs)


def _inputs(model: Any, device: torch.device) -> dict[str, Tensor]:
    """Rows of two different lengths, so that one has padding."""
    rows = model.get_input_embeddings().weight.shape[0]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    width = min(TOKENS, limit) if isinstance(limit, int) and limit > 0 else TOKENS
    tokens = torch.randint(rows, (ROWS, width), generator=torch.Generator().manual_seed(0))
    real = real_tokens(torch.tensor([width, max(1, width - width // 4)]), width)
    return {"input_ids": tokens.to(device), "attention_mask": real.long().to(device)}


@torch.no_grad()
def _outputs(model: Any, inputs: Mapping[str, Tensor], training: bool) -> Tensor:
    """(tokens, width) outputs at the tokens that are not padding."""
    model.train(training)
    output = model(**inputs, use_cache=False)
    result = output.logits if "logits" in output else output.last_hidden_state
    return result[inputs["attention_mask"].bool()].clone()


def _distance(first: Tensor, second: Tensor) -> float:
    """Largest difference of two outputs; equal infinities or two NaNs at a position count as equal."""
    same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(same, 0.0, (first.float() - second.float()).abs()).max())


def _cuda_state(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _equal_states(before: tuple[Tensor, Tensor | None], after: tuple[Tensor, Tensor | None]) -> bool:
    return all(a is None or b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores the model's mode, its buffers and the random generators after the body."""
    modes = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for module, training in modes.items():
            module.training = training


Marks = tuple[list[float], list[float]]
"""Fingerprints of a module's inputs and of its outputs."""


def _differing(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[str]:
    """`name (class)` of the innermost modules whose outputs differ for equal inputs, or that some passes do not call."""
    modules, seen = dict(model.named_modules()), [_watched(model, inputs, training) for training in (False, False, True)]
    names: list[str] = []
    while not names and len(seen) < RANDOM_PASSES:
        seen.append(_watched(model, inputs, training=True))
        names = _turned_modules(list(modules), seen)
    told = [f"{name or 'the model'} ({type(modules[name]).__name__})" for name in names]
    return told[:MOST_NAMED] + ([f"{len(told) - MOST_NAMED} more"] if len(told) > MOST_NAMED else [])


def _turned_modules(modules: Sequence[str], seen: Sequence[Mapping[str, Marks]]) -> list[str]:
    names: list[str] = []
    for name in modules:
        passes = [marks.get(name) for marks in seen]
        if any(_turned(first, second) for first, second in pairwise(passes)):
            names = [outer for outer in names if outer and not name.startswith(f"{outer}.")] + [name]
        elif None in passes and any(passes) and None not in [marks.get(name.rpartition(".")[0]) for marks in seen]:
            names.append(name)
    return names


def _watched(model: nn.Module, inputs: Mapping[str, Tensor], training: bool) -> dict[str, Marks]:
    """The fingerprints of every module that one pass calls."""
    seen: dict[str, Marks] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            received, returned = seen.setdefault(name, ([], []))
            received += _marks((args, kwargs))
            returned += _marks(output)

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(note(name), with_kwargs=True).remove)
        _outputs(model, inputs, training)
    return seen


def _marks(value: Any) -> list[float]:
    """A fingerprint of a nested value: two numbers per tensor."""
    if isinstance(value, Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        numbers = value.detach().double().flatten().nan_to_num()
        places = torch.arange(numbers.numel(), device=numbers.device) % 97 + 1
        return [float(numbers.sum()), float((numbers * places).sum())]
    if isinstance(value, Mapping):
        return [mark for part in value.values() for mark in _marks(part)]
    if isinstance(value, list | tuple):
        return [mark for part in value for mark in _marks(part)]
    return []


def _turned(first: Marks | None, second: Marks | None) -> bool:
    """Whether a module returned different outputs for equal inputs."""
    return first is not None and second is not None and _alike(first[0], second[0]) and not _alike(first[1], second[1])


def _alike(first: list[float], second: list[float]) -> bool:
    return len(first) == len(second) and bool(np.allclose(first, second, rtol=1e-6))
