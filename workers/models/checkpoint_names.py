"""Converts tensors as transformers holds them to tensors as a checkpoint stores them.

Transformers fuses or renames some tensors when it loads a checkpoint: the experts of a layer are one tensor in
transformers, but three per expert in a checkpoint. Other engines expect checkpoint names and may silently ignore others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tandem.workers.models.loading import shapes


class CheckpointNames:
    """Converts buckets of a model's tensors to checkpoint tensors.

    Tensors that can only be converted together with others wait until all such tensors have arrived.
    """

    def __init__(self, skeleton: Any) -> None:
        """`skeleton`: the model on the meta device."""
        self._model = skeleton
        held = dict(skeleton.state_dict())
        whole = shapes(self._revert(held))
        self._is_same = whole == shapes(held)
        self._alone = set() if self._is_same else {name for name in held if self._stands_alone(name, held[name], whole)}
        self._together = held.keys() - self._alone
        self._waiting: dict[str, Tensor] = {}

    def of(self, bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint tensors for this bucket and for waiting tensors that it completes; empty if all must wait."""
        if self._is_same:
            return dict(bucket)
        ready = {name: tensor for name, tensor in bucket.items() if name in self._alone}
        # Copies: the sender may overwrite its tensors before the last one arrives.
        self._waiting |= {name: tensor.clone() for name, tensor in bucket.items() if name not in self._alone}
        if self._together <= self._waiting.keys():
            ready |= self._waiting
            self._waiting = {}
        return self._revert(ready)

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, tensors)) if tensors else {}

    def _stands_alone(self, name: str, tensor: Tensor, whole: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a tensor can be converted without others."""
        try:
            part = shapes(self._revert({name: tensor}))
        except Exception:  # the conversion needs other tensors
            return False
        return all(whole.get(key) == shape for key, shape in part.items())
