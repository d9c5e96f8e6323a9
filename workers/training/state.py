"""The state of a model under training as whole tensors by name, independent of ZeRO stage and number of ranks.

    weights/<name>                      float32; the master copy where the model itself is bfloat16
    exp_avg/<name>, exp_avg_sq/<name>   Adam's moments, from the first update on
    fixed/<name>                        saved buffers, and parameters that are not trained, in their own dtype

DeepSpeed's own checkpoints are pickles and tied to one number of ranks; these are neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.workers.models.loading import saved_tensors

WEIGHTS, MOMENTS, FIXED = "weights", ("exp_avg", "exp_avg_sq"), "fixed"


class StateError(RuntimeError):
    """A saved state does not belong to this model."""


class TrainingState:
    """Reads and writes the state of a DeepSpeed engine over AdamW. All methods but `updates` are collective.

    Args:
        schedule: of the learning rate, which counts updates. stage: the ZeRO stage.
    """

    def __init__(self, engine: Any, adam: torch.optim.AdamW, schedule: Any, stage: int) -> None:
        self._engine, self._adam, self._schedule, self._stage = engine, adam, schedule, stage
        self._missing: set[str] = set()

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        return max((int(state["step"]) for state in self._adam.state.values() if "step" in state), default=0)

    def read(self, named: Sequence[tuple[str, Any]]) -> dict[str, Tensor]:
        """The whole state of these parameters and buffers, on the CPU."""
        updates = self.updates
        return {
            f"{kind}/{name}": self._get(kind, tensor).cpu() for name, tensor in named for kind in _kinds(tensor, updates)
        }

    def begin(self, updates: int) -> None:
        """Prepares for `write`: creates zero moments, with the step count set to `updates`."""
        self._missing = set(self._expected(updates))
        self._adam.state.clear()
        if updates:
            for flat in self._held():
                moments = {kind: torch.zeros_like(flat) for kind in MOMENTS}
                self._adam.state[flat] = {"step": torch.tensor(float(updates)), **moments}
            if self._stage in (1, 2):  # connects each parameter with its shard of the moments
                self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def write(self, part: Mapping[str, Tensor]) -> None:
        """Sets whole tensors.

        Raises:
            StateError: the model does not have a tensor, or has it in another shape.
        """
        saved = saved_tensors(self._engine.module)
        for key, tensor in part.items():
            kind, _, name = key.partition("/")
            if key not in self._missing:
                raise StateError(f"the checkpoint has {key}, which this model does not have")
            shape = tuple(getattr(saved[name], "ds_shape", saved[name].shape))
            if tuple(tensor.shape) != shape:
                raise StateError(f"the checkpoint's {key} has shape {tuple(tensor.shape)}, this model's {shape}")
            self._set(kind, saved[name], tensor)
            self._missing.discard(key)

    def end(self, updates: int) -> None:
        """Finishes after the last `write`; the learning rate resumes at `updates`.

        Raises:
            StateError: a tensor has not been set.
        """
        if self._missing:
            raise StateError(f"the checkpoint lacks {len(self._missing)} tensors, {min(self._missing)} first")
        self._schedule.last_epoch = updates
        for group, base, factor in zip(
            self._adam.param_groups, self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(updates)
        self._schedule._last_lr = [group["lr"] for group in self._adam.param_groups]

    def _expected(self, updates: int) -> Iterator[str]:
        for name, tensor in saved_tensors(self._engine.module).items():
            yield from (f"{kind}/{name}" for kind in _kinds(tensor, updates))

    def _held(self) -> list[Any]:
        """The tensors that key Adam's state on this rank."""
        if self._stage == 0:
            return [parameter for parameter in self._engine.module.parameters() if parameter.requires_grad]
        optimizer = self._engine.optimizer
        return list(
            optimizer.fp32_partitioned_groups_flat if self._stage == 3 else optimizer.single_partition_of_fp32_groups
        )

    def _get(self, kind: str, parameter: Any) -> Tensor:
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if kind == FIXED:
            is_sharded = self._stage == 3 and isinstance(parameter, nn.Parameter)
            with deepspeed.zero.GatheredParameters([parameter] if is_sharded else [], enabled=is_sharded):
                return parameter.detach().clone()
        if self._stage == 0:
            return parameter.detach() if kind == WEIGHTS else self._adam.state[parameter][kind]
        if kind == WEIGHTS:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, kind)

    def _set(self, kind: str, parameter: Any, tensor: Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if kind in (WEIGHTS, FIXED):
            if self._stage > 0 and kind == WEIGHTS:
                safe_set_full_fp32_param(parameter, tensor)
            is_sharded = self._stage == 3 and isinstance(parameter, nn.Parameter)
            with deepspeed.zero.GatheredParameters([parameter] if is_sharded else [], modifier_rank=0, enabled=is_sharded):
                parameter.data.copy_(tensor)
        elif self._stage == 0:
            self._adam.state[parameter][kind].copy_(tensor)
        else:
            safe_set_full_optimizer_state(parameter, tensor, kind)


def _kinds(tensor: Tensor, updates: int) -> tuple[str, ...]:
    """The kinds of state that a parameter or buffer has after `updates` updates."""
    if not tensor.requires_grad:
        return (FIXED,)
    return (WEIGHTS, *MOMENTS) if updates else (WEIGHTS,)
