"""Tensors as a checkpoint has them, from those that transformers holds: it fuses or renames some when it loads them.

An engine of its own reads the names of checkpoints, and may pass over others without a word: the experts of a layer are one
tensor in transformers, and three for each expert in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tandem.workers.models.loading import shapes


class CheckpointNames:
    """Turns buckets of a model's tensors into those of a checkpoint.

    A tensor of which others are a part waits until all of them are there.
    """

    def __init__(self, skeleton: Any) -> None:
        """`skeleton`: the model on the meta device."""
        self._model = skeleton
        own = dict(skeleton.state_dict())
        whole = shapes(self._revert(own))
        self._is_same = whole == shapes(own)
        self._alone = set() if self._is_same else {name for name in own if self._stands_alone(name, own[name], whole)}
        self._together = own.keys() - self._alone
        self._waiting: dict[str, Tensor] = {}

    def of(self, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has of these tensors, and of those that waited for them; empty if all have to wait."""
        if self._is_same:
            return dict(bucket)
        ready = {name: tensor for name, tensor in bucket.items() if name in self._alone}
        # Copies: the sender may write to its tensors before the last part is there.
        self._waiting |= {name: tensor.clone() for name, tensor in bucket.items() if name not in self._alone}
        if self._together <= self._waiting.keys():
            ready |= self._waiting
            self._waiting = {}
        return self._revert(ready)

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, tensors)) if tensors else {}

    def _stands_alone(self, name: str, tensor: Tensor, whole: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a tensor gives its part of the checkpoint without others."""
        try:
            part = shapes(self._revert({name: tensor}))
        except Exception:  # an operation that misses its other operands
            return False
        return all(whole.get(key) == shape for key, shape in part.items())
