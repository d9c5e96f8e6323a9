"""DeepSpeed as a training backend: on CPU over gloo, on CUDA over NCCL."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.platform.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from tandem.platform.experience.batch import LossOutput, TrainBatch
from tandem.platform.loop.metrics import add_totals
from tandem.platform.loop.protocols import Totals, TrainingError
from tandem.platform.loop.schedules import rate_factor
from tandem.workers.cluster.runtime import Rank, Rendezvous, join_process_group
from tandem.workers.models.footprint import Activations, baseline_bytes, model_bytes, tensor_bytes
from tandem.workers.models.loading import saved_tensors, set_buffer
from tandem.workers.training.backend import CPU, Objective
from tandem.workers.training.state import TrainingState

LARGEST_REDUCTION = 500_000_000  # elements; DeepSpeed's default


class DeepSpeedBackend:
    """A model in a DeepSpeed engine. Construction is collective over the ranks of the role."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        config: ModelConfig,
        rank: Rank,
        device: torch.device,
        rendezvous: tuple[tuple[str, int], Rendezvous | None, float],
    ) -> None:
        # Without ZeRO, DeepSpeed trains bfloat16 with an optimizer that counts one step too many.
        self.stage = max(trainer.zero_stage, 1) if config.dtype == "bfloat16" else trainer.zero_stage
        self.name, self.world_size, self._part_bytes = name, rank.world_size, trainer.bucket_mb << 20
        self.device, self.is_first = device, rank.index == 0
        address, host, timeout_s = rendezvous
        join_process_group(rank, device, address, host.store if host else None, timeout_s)
        deepspeed = _import_deepspeed(device)
        self._baseline, self._activations = baseline_bytes(device, held=model_bytes(model)), Activations()
        self._gathered = deepspeed.zero.GatheredParameters
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        adam = torch.optim.AdamW(
            parameters,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, rate_factor(optimizer))
        self.engine, *_ = deepspeed.initialize(
            model=model.to(device),
            optimizer=adam,
            lr_scheduler=schedule,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": optimizer.grad_clip,
                "zero_optimization": {"stage": self.stage, "reduce_bucket_size": _bucket_elements(parameters)},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": config.dtype == "bfloat16"},
                "steps_per_print": None,
            },
        )
        # With bfloat16, DeepSpeed casts buffers too: rotary embeddings would be off by a full turn at position 1000.
        for name, buffer in buffers.items():
            set_buffer(self.engine.module, name, buffer.to(device))
        self._adam, self._gradient_bytes = adam, 0
        self._state = TrainingState(self.engine, adam, schedule, self.stage)

    def forward(self, **inputs: Any) -> Any:
        """See `TrainerBackend.forward`."""
        self.engine.eval()
        return self.engine(**inputs)

    def step(self, parts: Sequence[TrainBatch], objective: Objective) -> Totals:
        """See `TrainerBackend.step`.

        DeepSpeed averages gradients over ranks and divides them by its accumulation steps. The loss already has the global
        denominator, so a factor of the world size undoes the average, and this method controls accumulation itself to
        avoid the division.
        """
        self.engine.train()
        totals, losses = [], list[Tensor]()
        for number, part in enumerate(parts):
            self.engine.set_gradient_accumulation_boundary(number == len(parts) - 1)
            part = part.trim().to(self.device)
            with self._activations.watch(part.rollout.tokens.numel()):
                output = objective(self.engine, part)
            self.engine.backward(output.loss * self.world_size)
            totals.append(as_totals(output))
            losses.append(output.loss.detach())
        self._gradient_bytes, norm = self._count_gradients(), self._own_grad_norm()
        learning_rate, before = self._adam.param_groups[0]["lr"], self._fingerprints()
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm()) if norm is None else norm
        loss = float(torch.stack(losses).sum())
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise TrainingError(
                f"{self.name}: the gradient norm is {norm}, the loss {loss:g}. The weights can no longer be trusted. "
                f"Lower {self.name}.lr (now {learning_rate:g}) or look for infinite rewards or log-probs in the samples"
            )
        unmoved = frozenset(name for name, value in self._fingerprints().items() if before[name] == value)
        prefix = _prefix(self.name)
        sums = {f"{prefix}/grad_norm": (norm, 1.0), f"{prefix}/lr": (learning_rate, 1.0)}
        return add_totals([*totals, Totals(sums, {}, unmoved)])

    def gradient_noise(self, halves: Sequence[Sequence[TrainBatch]], objective: Objective) -> Totals:
        """See `TrainerBackend.gradient_noise`: `gradient_variance`, and `gradient_noise`, its ratio to the squared norm.

        With gradients a and b of the halves, the batch gradient is (a + b) / 2, and |a - b|^2 / 4 estimates the trace of
        its covariance: Var((a + b) / 2) = Var(a) / 2, and E|a - b|^2 = 2 tr Var(a).
        """
        self.engine.train()
        first, second = (self._gradient(parts, objective) for parts in halves)
        variance = sum(_squares(a.double() - b.double()) for a, b in zip(first, second, strict=True)) / 4
        signal = sum(_squares(a.double() + b.double()) for a, b in zip(first, second, strict=True)) / 4
        prefix = _prefix(self.name)
        noise = {f"{prefix}/gradient_noise": (variance / signal, 1.0)} if signal > 0 else {}
        return Totals({f"{prefix}/gradient_variance": (variance, 1.0), **noise}, {})

    def _gradient(self, parts: Sequence[TrainBatch], objective: Objective) -> list[Tensor]:
        """The gradient of the parts' loss, summed over ranks: a CPU tensor per parameter. Not for ZeRO stage 3.

        The engine's own gradients do not change.
        """
        assert self.stage < 3, "validate() refuses it"
        parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
        totals = [torch.zeros(p.shape) for p in parameters]
        for part in parts:
            loss = objective(self.engine.module, part.trim().to(self.device)).loss
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            for total, gradient in zip(totals, gradients, strict=True):
                total += gradient.float().cpu()
        if self.world_size > 1:
            for total in totals:
                here = total.to(self.device)
                torch.distributed.all_reduce(here)
                total.copy_(here)
        return totals

    @torch.no_grad()
    def _fingerprints(self) -> dict[str, float]:
        """A number per trainable tensor (or this rank's shard) that any update changes, by `<role>: <name>`."""
        shards = {
            f"{self.name}: {name}": getattr(p, "ds_tensor", p)
            for name, p in self.engine.module.named_parameters()
            if p.requires_grad
        }
        norms = torch.stack([torch.linalg.vector_norm(shard, dtype=torch.float64) for shard in shards.values()])
        return dict(zip(shards, norms.tolist(), strict=True))

    def agree(self, count: int) -> int:
        """See `TrainerBackend.agree`."""
        if self.world_size == 1:
            return count
        largest = torch.tensor(count, device=self.device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return int(largest)

    def named_weights(
        self, bucket_bytes: int, device: torch.device = CPU, everywhere: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """See `TrainerBackend.named_weights`; each bucket is gathered from its ZeRO shards once."""
        for bucket in self._buckets(bucket_bytes):
            parameters = [tensor for _, tensor in bucket if isinstance(tensor, nn.Parameter)]
            with self._gathered(parameters, enabled=self.stage == 3):
                wanted = bucket if self.is_first or everywhere else []
                # A copy: tensors gathered from shards are freed when the gathering ends.
                whole = {name: p.detach().to(device, copy=self.stage == 3) for name, p in wanted}
            yield whole  # after the gathering, so the gathered tensors are freed before the caller uses the bucket

    def offload(self) -> None:
        """See `TrainerBackend.offload`."""
        if self.device.type == "cuda":
            if self.stage > 0:
                self.engine.offload_states()
            else:
                self._move(CPU)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `TrainerBackend.onload`."""
        if self.device.type == "cuda":
            if self.stage > 0:
                self.engine.reload_states()
            else:
                self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """Moves the weights and optimizer state of a model without ZeRO; drops gradients, which the last step has used."""
        for parameter in self.engine.module.parameters():
            parameter.data, parameter.grad = parameter.data.to(device), None
        for state in self._adam.state.values():
            state |= {name: value.to(device) for name, value in state.items() if isinstance(value, Tensor) and value.dim()}

    def bucket_count(self, bucket_bytes: int) -> int:
        """See `TrainerBackend.bucket_count`."""
        return len(list(self._buckets(bucket_bytes)))

    def _buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, Any]]]:
        return _buckets(list(saved_tensors(self.engine.module).items()), bucket_bytes)

    def state_parts(self) -> Iterator[dict[str, Tensor]]:
        """See `TrainerBackend.state_parts`."""
        for bucket in self._buckets(self._part_bytes):
            part = self._state.read(bucket)
            yield part if self.is_first else {}

    def state_part_count(self) -> int:
        """See `TrainerBackend.state_part_count`."""
        return self.bucket_count(self._part_bytes)

    def updates(self) -> int:
        """See `TrainerBackend.updates`."""
        return self._state.updates

    def begin_load(self, updates: int) -> None:
        """See `TrainerBackend.begin_load`."""
        self._state.begin(updates)

    def load_part(self, part: Mapping[str, Tensor]) -> None:
        """See `TrainerBackend.load_part`."""
        self._state.write(part)

    def end_load(self, updates: int) -> None:
        """See `TrainerBackend.end_load`."""
        self._state.end(updates)

    def memory(self) -> dict[str, int]:
        """See `TrainerBackend.memory`."""
        weights = [getattr(p, "ds_tensor", p) for p in self.engine.module.parameters()]
        owned = {p.data_ptr() for p in self.engine.module.parameters()}
        groups = [p for group in self._adam.param_groups for p in group["params"]]
        # In stage 3 the optimizer's parameter groups hold the float32 copies only during a step.
        masters = [p for p in groups if p.data_ptr() not in owned] or getattr(
            self.engine.optimizer, "fp32_partitioned_groups_flat", []
        )
        moments = [t for state in self._adam.state.values() for t in state.values() if isinstance(t, Tensor)]
        return {
            "weights": tensor_bytes(weights),
            "gradients": self._gradient_bytes,
            "optimizer": tensor_bytes(masters) + tensor_bytes(moments),
            "activations": self._activations.bytes,
            "baseline": self._baseline,
        }

    def _own_grad_norm(self) -> float | None:
        """The norm of the reduced gradients where they are whole and DeepSpeed does not measure their norm; else None."""
        if self.stage > 0 or self.engine.bfloat16_enabled():
            return None
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def _count_gradients(self) -> int:
        """Bytes of the gradients on this rank; from ZeRO stage 2 on, a rank keeps only its shard."""
        if self.stage < 2:
            return tensor_bytes(self._gradients())
        count = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        return math.ceil(count / self.world_size) * self.engine.communication_data_type.itemsize

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.engine.module.parameters() if p.grad is not None]


def as_totals(output: LossOutput) -> Totals:
    """The metrics of a micro-batch as plain numbers."""
    sums = {name: (float(num), float(den)) for name, (num, den) in output.metrics.items()}
    return Totals(sums, {name: float(value) for name, value in output.maxima.items()})


def _bucket_elements(parameters: Sequence[Tensor]) -> int:
    """Gradient elements per ZeRO reduction: at most all of them, or DeepSpeed reserves gigabytes for any model."""
    return min(LARGEST_REDUCTION, max(1, sum(parameter.numel() for parameter in parameters)))


def _prefix(name: str) -> str:
    return "policy" if name == "actor" else name


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum())


def _buckets(named: list[tuple[str, Any]], bucket_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, parameter in named:
        count = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and size + count > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += count
    if bucket:
        yield bucket


def _import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for this device without its C++ builds: on CPU, its shared-memory op would compile for a minute."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's autotuner, which is unused here, would import mlflow if installed, which takes a second.
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    import deepspeed

    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)
    return deepspeed
