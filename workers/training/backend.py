"""What the actor and the critic ask of a training engine; another engine is another class with these methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.platform.experience.batch import LossOutput, TrainBatch
from tandem.platform.loop.protocols import Totals

CPU = torch.device("cpu")

Objective = Callable[[Callable[..., Any], TrainBatch], LossOutput]
"""(forward pass of the model, micro-batch on the device) -> its part of the loss of the mini-batch."""


class TrainerBackend(Protocol):
    """A model under training on the ranks of one role."""

    device: torch.device

    def forward(self, **inputs: Any) -> Any:
        """The model's forward pass in evaluation mode; with more than one rank, all call it equally often."""
        ...

    def step(self, parts: Sequence[TrainBatch], objective: Objective) -> Totals:
        """One optimizer step over the micro-batches of one mini-batch; all ranks give equally many."""
        ...

    def gradient_noise(self, halves: Sequence[Sequence[TrainBatch]], objective: Objective) -> Totals:
        """How much the gradients of two halves of a batch differ; nothing is moved. All ranks give equally many parts."""
        ...

    def agree(self, count: int) -> int:
        """The largest `count` of all ranks."""
        ...

    def named_weights(
        self, bucket_bytes: int, device: torch.device = CPU, everywhere: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Whole weights and saved buffers on `device` in parts of about `bucket_bytes`, on rank 0 or `everywhere`; empty on
        others.

        All ranks iterate. A tensor may be the model's own: it is good until the next `step`.
        """
        ...

    def bucket_count(self, bucket_bytes: int) -> int:
        """How many parts `named_weights` gives."""
        ...

    def offload(self) -> None:
        """Moves weights, gradients and optimizer into host memory; collective."""
        ...

    def onload(self) -> None:
        """Moves them back."""
        ...

    def state_parts(self) -> Iterator[dict[str, Tensor]]:
        """All that training has made, as whole tensors in parts; empty on all ranks but the first. All iterate."""
        ...

    def state_part_count(self) -> int:
        """How many parts `state_parts` gives."""
        ...

    def updates(self) -> int:
        """Optimizer steps so far."""
        ...

    def begin_load(self, updates: int) -> None:
        """Prepares for a state that `state_parts` gave after so many updates, on any number of ranks."""
        ...

    def load_part(self, part: Mapping[str, Tensor]) -> None:
        """Takes a part of it; collective."""
        ...

    def end_load(self, updates: int) -> None:
        """Training can go on; raises StateError if anything is missing."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer and activations on this rank, from the tensors themselves; baseline."""
        ...
