"""The protocol of a training engine. The actor and the critic depend only on it; another engine is another class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.platform.experience.batch import LossOutput, TrainBatch
from tandem.platform.loop.protocols import Totals

CPU = torch.device("cpu")

Objective = Callable[[Callable[..., Any], TrainBatch], LossOutput]
"""(forward pass of the model, micro-batch on the device) -> its share of the mini-batch's loss."""


class TrainerBackend(Protocol):
    """A model under training on the ranks of one role."""

    device: torch.device

    def forward(self, **inputs: Any) -> Any:
        """The model's forward pass in evaluation mode. All ranks must call it the same number of times."""
        ...

    def step(self, parts: Sequence[TrainBatch], objective: Objective) -> Totals:
        """Takes one optimizer step over the micro-batches of one mini-batch; all ranks pass the same number."""
        ...

    def gradient_noise(self, halves: Sequence[Sequence[TrainBatch]], objective: Objective) -> Totals:
        """Measures how much the gradients of two batch halves differ. No weight changes. All ranks pass as many parts."""
        ...

    def agree(self, count: int) -> int:
        """The largest `count` over all ranks."""
        ...

    def named_weights(
        self, bucket_bytes: int, device: torch.device = CPU, everywhere: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Yields whole weights and saved buffers on `device`, in buckets of about `bucket_bytes`. The buckets are empty
        except on rank 0, or on no rank if `everywhere`.

        All ranks must iterate. A tensor may share memory with the model, so it is valid only until the next `step`.
        """
        ...

    def bucket_count(self, bucket_bytes: int) -> int:
        """The number of buckets that `named_weights` yields."""
        ...

    def offload(self) -> None:
        """Moves weights, gradients and optimizer state to host memory; collective."""
        ...

    def onload(self) -> None:
        """Moves weights, gradients and optimizer state back to the device; collective."""
        ...

    def state_parts(self) -> Iterator[dict[str, Tensor]]:
        """Yields the training state in parts of whole tensors, which are empty except on rank 0. All ranks must iterate."""
        ...

    def state_part_count(self) -> int:
        """The number of parts that `state_parts` yields."""
        ...

    def updates(self) -> int:
        """Optimizer steps so far."""
        ...

    def begin_load(self, updates: int) -> None:
        """Prepares to load a state that `state_parts` yielded after `updates` updates, on any number of ranks."""
        ...

    def load_part(self, part: Mapping[str, Tensor]) -> None:
        """Loads one part of the state; collective."""
        ...

    def end_load(self, updates: int) -> None:
        """Finishes loading; raises StateError if anything is missing."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer and activations on this rank, from their tensors, and the baseline."""
        ...
