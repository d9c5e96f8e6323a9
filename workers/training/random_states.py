"""The states of a process's random generators, in a form that JSON can hold."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, including any CUDA devices."""
    name, keys, *rest = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _as_text(torch.get_rng_state()),
        "cuda": [_as_text(state) for state in devices],
    }


def seed_random(seed: int) -> None:
    """Seeds all generators: two processes with the same seed draw the same numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA devices too


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the output of `random_states`; the CUDA states only with the same number of devices."""
    version, numbers, spare = states["python"]
    random.setstate((version, tuple(numbers), spare))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_as_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_as_tensor(text) for text in states["cuda"]])


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _as_tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
