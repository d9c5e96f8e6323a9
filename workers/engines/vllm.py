"""The `vllm` rollout engine: continuous batching over a paged key-value cache, on CPU and CUDA, inside this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.platform.config.schema import ConfigError, ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt, StopReason
from tandem.platform.loop.checksum import checksum
from tandem.platform.loop.protocols import Sampling
from tandem.platform.loop.seeds import mix
from tandem.workers.cluster.runtime import own_device_indices, own_interface
from tandem.workers.engines.completion import Sampled
from tandem.workers.engines.running_batch import RunningBatch
from tandem.workers.models.checkpoint_names import CheckpointNames
from tandem.workers.models.description import end_token_ids
from tandem.workers.models.loading import policy_bytes, skeleton
from tandem.workers.models.tokenizer import load_tokenizer

GIB = 2**30
TAGS = {"weights": "weights", "cache": "kv_cache"}
"""vLLM's names for the parts of its memory that can sleep."""


class VLLMEngine:
    """Samples with vLLM.

    A response depends only on the weights, its prompt, its group, its sample number and the seed. It does not depend on the
    other requests in the batch or on the number of engines (up to float rounding of the logits).
    """

    continuous: ClassVar[bool] = True

    def __init__(self, path: str, model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> None:
        self.device, self._skip_special = device, not rollout.keep_special_tokens
        self.tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        self.stop_ids = end_token_ids(path, self.tokenizer) | set(rollout.stop_token_ids)
        self.stop = tuple(rollout.stop)
        self.engine = _start(path, model, rollout, device)
        # vLLM would pick the default tokenizer of the model type, which can differ from the saved tokenizer.
        self.engine.output_processor.tokenizer = self.tokenizer
        model_skeleton = skeleton(path, model)
        self._names, self._bytes = CheckpointNames(model_skeleton), policy_bytes(model_skeleton, model)
        self._cache_bytes = sum(self.engine.collective_rpc(_count_cache))
        self._batch = RunningBatch(self.engine)
        self._held: dict[str, Tensor] = {}
        self._is_loading = False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sampled]:
        """The samples in order of the prompts, those of one prompt adjacent. Calls from several threads share a batch."""
        if sampling.max_tokens == 0 or not prompts:
            return [Sampled() for _ in range(len(prompts) * sampling.samples)]
        outputs = self._batch.run([(list(prompt.ids), self._parameters(prompt, sampling)) for prompt in prompts])
        # Greedy samples of a prompt are identical, and vLLM refuses to generate more than one.
        copies = sampling.samples if sampling.temperature == 0 else 1
        return [_sampled(response) for output in outputs for response in output.outputs for _ in range(copies)]

    def load_weights(self, bucket: dict[str, Tensor], verify: bool = True) -> dict[str, int]:
        """Takes tensors by their name in transformers; with `verify`, returns their checksums as they arrived.

        On a GPU the first call pauses the engine until `finish_weights`. On a CPU vLLM repacks its weights and can load new
        ones only all together, so `finish_weights` applies them and the engine keeps running until then.
        """
        arrived = {name: checksum(tensor.cpu()) for name, tensor in bucket.items()} if verify else {}
        if self.device.type == "cpu":
            # Copies: the sender may write to its tensors before the weights are complete.
            self._held |= {name: tensor.detach().clone() for name, tensor in bucket.items()}
        else:
            self._stand_still()
            self.engine.collective_rpc(partial(_load, list(self._names.of(bucket).items())))
        return arrived

    def finish_weights(self) -> None:
        """Applies the weights that were held back, and drops caches computed with the old weights."""
        self._stand_still()
        try:
            if self._held:
                held, self._held = self._names.of(self._held), {}
                self.engine.collective_rpc(_unpack_experts)
                self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(held.items())})
                self.engine.collective_rpc(_repack_kept)
            # Running requests recompute their cache; otherwise they would read keys and values from the old weights.
            self.engine.reset_prefix_cache(reset_running_requests=True)
        finally:
            self._is_loading = False
            self._batch.resume()

    def _stand_still(self) -> None:
        if not self._is_loading:
            self._batch.pause()
            self._is_loading = True

    def weight_bytes(self) -> int:
        """Bytes of the weights, over all GPUs of this engine."""
        return self._bytes

    def cache_bytes(self) -> int:
        """Bytes of the key-value cache, which vLLM allocates in full at startup, over all GPUs of this engine."""
        return self._cache_bytes

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache; no request may be running.

        The weights stay in host memory, so waking without new weights is safe.
        """
        if self.device.type == "cuda":
            with self._batch.paused():
                self.engine.sleep(level=1)

    def wake(self, what: str) -> None:
        """Reclaims GPU memory: first for "weights", then, once they are loaded, for "cache"."""
        if self.device.type == "cuda":
            with self._batch.paused():
                self.engine.wake_up([TAGS[what]])

    def _parameters(self, prompt: Prompt, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = sampling.temperature == 0
        return SamplingParams(
            n=1 if greedy else sampling.samples,
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy or sampling.top_k is None else sampling.top_k,
            max_tokens=sampling.max_tokens,
            # vLLM seeds sample i of a request with seed + i; half the range leaves room for the addition.
            seed=mix(*sampling.seed, prompt.group_id) // 2,
            stop_token_ids=sorted(self.stop_ids),
            ignore_eos=True,  # stop_token_ids is the complete list
            stop=list(self.stop),
            detokenize=bool(self.stop),
            skip_special_tokens=self._skip_special,
            output_kind=RequestOutputKind.FINAL_ONLY,  # all samples of the prompt at once
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
        )


def _start(path: str, model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> Any:
    """Starts a vLLM engine in this process and undoes vLLM's changes to the process.

    Raises:
        ConfigError: vLLM cannot work with a setting on this device.
    """
    on_cpu = device.type == "cpu"
    if on_cpu and rollout.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.tensor_parallel={rollout.tensor_parallel} needs as many GPUs, but models are on the CPU here. "
            "Set rollout.tensor_parallel=1"
        )
    _set_environment(on_cpu)
    from vllm import EngineArgs, LLMEngine

    preload, set_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    try:
        settings = EngineArgs(**_arguments(path, model, rollout, on_cpu)).create_engine_config()
        if on_cpu:
            _check_head_size(settings.model_config.get_head_size())
        else:
            settings.parallel_config.assigned_physical_gpu_ids = _physical(
                own_device_indices() if rollout.tensor_parallel > 1 else [device.index or 0]
            )
        with own_interface():
            return LLMEngine.from_vllm_config(settings, disable_log_stats=True)
    except ConfigError:
        raise
    except ValueError as error:
        key, value = ("kv_cache_gb", rollout.kv_cache_gb) if on_cpu else ("gpu_memory_share", rollout.gpu_memory_share)
        raise ConfigError(
            f"vLLM cannot start: {error}\nThe settings in tandem: memory is rollout.{key} (now {value}), longest sequence "
            f"rollout.max_model_tokens (now {rollout.max_model_tokens} tokens), sequences in a batch "
            f"rollout.max_batch_sequences (now {rollout.max_batch_sequences})"
        ) from error
    finally:
        # On a CPU, vLLM preloads its allocator into all later child processes and disables `torch.set_num_threads`.
        torch.set_num_threads = set_threads
        os.environ.pop("LD_PRELOAD", None)
        os.environ |= {} if preload is None else {"LD_PRELOAD": preload}


def _physical(indices: Sequence[int]) -> list[int] | None:
    """vLLM's device ids for these torch device indices; None leaves the choice to vLLM."""
    from vllm.platforms import current_platform

    return [current_platform.visible_device_id_to_physical_device_id(index) for index in indices] or None


def _arguments(path: str, model: ModelConfig, rollout: RolloutConfig, on_cpu: bool) -> dict[str, Any]:
    """Our settings as vLLM engine arguments."""
    arguments = {
        "model": path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "max_num_seqs": rollout.max_batch_sequences,
        "tensor_parallel_size": rollout.tensor_parallel,
        # Ray has already placed this process; vLLM's tensor-parallel workers are its child processes.
        "distributed_executor_backend": "uni" if rollout.tensor_parallel == 1 else "mp",
        "gpu_memory_utilization": rollout.gpu_memory_share,
        "enable_prefix_caching": rollout.prefix_caching,
        "enable_sleep_mode": not on_cpu,
        "enforce_eager": on_cpu,  # on CPU, compilation takes minutes and gains little
        "logprobs_mode": "processed_logprobs",  # of the sampling distribution: after temperature, top-p and top-k
        "generation_config": "vllm",  # ignores the sampling defaults of the model
        "seed": 0,  # every request has its own seed
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }
    if rollout.max_model_tokens is not None:
        arguments["max_model_len"] = rollout.max_model_tokens
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * GIB)
    return arguments


def _set_environment(on_cpu: bool) -> None:
    """Sets the variables that vLLM reads at import or startup."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, so weights stay in it
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if on_cpu:
        # vLLM compiles one line of the sampler even with enforce_eager, which costs the first call up to 30 seconds.
        import torch._dynamo

        torch._dynamo.config.disable = True


def _check_head_size(size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"rollout.engine=vllm on a CPU needs attention heads of {', '.join(map(str, known))} dimensions, but this "
            f"model's have {size}. Set rollout.engine=hf or, for the embedded model, change model.tiny.hidden_size and "
            "model.tiny.heads"
        )


def _sampled(output: Any) -> Sampled:
    """Converts a vLLM response."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a response for the reason {output.finish_reason}; expected stop or length")
    ids = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=False)]
    return Sampled(ids, logprobs, StopReason(output.finish_reason))


def _unpack_experts(worker: Any) -> None:
    """Makes vLLM repack experts for the CPU. Otherwise it would pack them only once and treat new weights as packed."""
    for module in worker.model_runner.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_kept(worker: Any) -> None:
    """Repacks the CPU layers for which vLLM keeps both the weight and a packed copy.

    An output layer tied to the embeddings is not loaded by name: its weight is new, but its packed copy is old.
    """
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _count_cache(worker: Any) -> int:
    """Bytes of the key-value cache of one vLLM worker; layers may share a storage."""
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _load(weights: list[tuple[str, Tensor]], worker: Any) -> None:
    """Loads weights; runs in each vLLM worker."""
    worker.model_runner.get_model().load_weights(weights)
