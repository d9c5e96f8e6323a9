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
"""vLLM's name of each part of its memory that sleeps."""


class VLLMEngine:
    """Samples with vLLM.

    A response is a function of the weights, its prompt, its group, its sample number and the seed: not of the other
    requests in the batch, nor of how many engines share the work (up to float rounding of the logits).
    """

    continuous: ClassVar[bool] = True

    def __init__(self, path: str, model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> None:
        self.device, self._skip_special = device, not rollout.keep_special_tokens
        self.tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
        self.stop_ids = end_token_ids(path, self.tokenizer) | set(rollout.stop_token_ids)
        self.stop = tuple(rollout.stop)
        self.engine = _start(path, model, rollout, device)
        # vLLM's own choice would be the tokenizer of the model's type, which may not be the one that was saved.
        self.engine.output_processor.tokenizer = self.tokenizer
        own = skeleton(path, model)
        self._names, self._bytes = CheckpointNames(own), policy_bytes(own, model)
        self._cache_bytes = sum(self.engine.collective_rpc(_count_cache))
        self._batch = RunningBatch(self.engine)
        self._held: dict[str, Tensor] = {}
        self._is_loading = False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sampled]:
        """The samples of each prompt side by side, in order of the prompts; calls of several threads run together."""
        if sampling.max_tokens == 0 or not prompts:
            return [Sampled() for _ in range(len(prompts) * sampling.samples)]
        outputs = self._batch.run([(list(prompt.ids), self._parameters(prompt, sampling)) for prompt in prompts])
        # Greedy samples of a prompt are all the same one, and vLLM refuses to make it more than once.
        copies = sampling.samples if sampling.temperature == 0 else 1
        return [_sampled(one) for output in outputs for one in output.outputs for _ in range(copies)]

    def load_weights(self, bucket: dict[str, Tensor], verify: bool = True) -> dict[str, int]:
        """Takes tensors by their name in transformers; with `verify` returns the checksum of each as it arrived.

        The first of them stops the engine until `finish_weights`. On a CPU vLLM has repacked its weights and reads new ones
        only as a whole, so they wait for `finish_weights`, and the engine goes on meanwhile.
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
        """Applies the weights that were held back, and drops what was computed with the old ones."""
        self._stand_still()
        try:
            if self._held:
                held, self._held = self._names.of(self._held), {}
                self.engine.collective_rpc(_unpack_experts)
                self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(held.items())})
                self.engine.collective_rpc(_repack_kept)
            # Requests that are running compute their cache again, or they would read keys and values of old weights.
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
        """Bytes of the key-value cache, which vLLM takes as a whole at its start, over all GPUs of this engine."""
        return self._cache_bytes

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache; nothing may be running.

        The weights are kept in host memory, so that waking without new ones is safe.
        """
        if self.device.type == "cuda":
            with self._batch.paused():
                self.engine.sleep(level=1)

    def wake(self, what: str) -> None:
        """Takes GPU memory back: first for "weights", then, once they are loaded, for the "cache"."""
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
            # vLLM gives sample i of a request the seed plus i; half the range leaves room for that.
            seed=mix(*sampling.seed, prompt.group_id) // 2,
            stop_token_ids=sorted(self.stop_ids),
            ignore_eos=True,  # stop_token_ids are all there are
            stop=list(self.stop),
            detokenize=bool(self.stop),
            skip_special_tokens=self._skip_special,
            output_kind=RequestOutputKind.FINAL_ONLY,  # all samples of the prompt at once
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
        )


def _start(path: str, model: ModelConfig, rollout: RolloutConfig, device: torch.device) -> Any:
    """A vLLM engine in this process; leaves the process as it was otherwise.

    Raises:
        ConfigError: a setting that it cannot work with on this device.
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
            f"vLLM cannot start: {error}\nIn tandem's words: its memory is rollout.{key} (now {value}), its longest "
            f"sequence rollout.max_model_tokens (now {rollout.max_model_tokens} tokens), sequences at once "
            f"rollout.max_batch_sequences (now {rollout.max_batch_sequences})"
        ) from error
    finally:
        # On a CPU vLLM preloads its allocator into all later child processes, and forbids setting threads.
        torch.set_num_threads = set_threads
        os.environ.pop("LD_PRELOAD", None)
        os.environ |= {} if preload is None else {"LD_PRELOAD": preload}


def _physical(indices: Sequence[int]) -> list[int] | None:
    """What vLLM calls the devices that torch sees at these places; None leaves the choice to vLLM."""
    from vllm.platforms import current_platform

    return [current_platform.visible_device_id_to_physical_device_id(index) for index in indices] or None


def _arguments(path: str, model: ModelConfig, rollout: RolloutConfig, on_cpu: bool) -> dict[str, Any]:
    """Our settings in vLLM's words."""
    arguments = {
        "model": path,
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype,
        "max_num_seqs": rollout.max_batch_sequences,
        "tensor_parallel_size": rollout.tensor_parallel,
        # Ray has placed this process already; workers of its own are children beside it.
        "distributed_executor_backend": "uni" if rollout.tensor_parallel == 1 else "mp",
        "gpu_memory_utilization": rollout.gpu_memory_share,
        "enable_prefix_caching": rollout.prefix_caching,
        "enable_sleep_mode": not on_cpu,
        "enforce_eager": on_cpu,  # compiling the model takes minutes and gains little there
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature and cuts included
        "generation_config": "vllm",  # sampling defaults that come with a model are not ours
        "seed": 0,  # every request has its own
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
    }
    if rollout.max_model_tokens is not None:
        arguments["max_model_len"] = rollout.max_model_tokens
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * GIB)
    return arguments


def _set_environment(on_cpu: bool) -> None:
    """What vLLM reads from the environment when it is imported or started."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, so weights need not leave it
    os.environ["VLLM_NO_USAGE_STATS"] = "1"  # sends nothing anywhere
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if on_cpu:
        # One line of the sampler is compiled even with enforce_eager, which costs the first call up to 30 seconds.
        import torch._dynamo

        torch._dynamo.config.disable = True


def _check_head_size(size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"rollout.engine=vllm on a CPU needs attention heads of {', '.join(map(str, known))} dimensions, but this "
            f"model's have {size}. Set rollout.engine=hf, or for the embedded model other model.tiny.hidden_size and "
            "model.tiny.heads"
        )


def _sampled(output: Any) -> Sampled:
    """One response of vLLM in our form."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a response with {output.finish_reason}, neither by a stop nor by its length")
    ids = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=False)]
    return Sampled(ids, logprobs, StopReason(output.finish_reason))


def _unpack_experts(worker: Any) -> None:
    """Lets vLLM pack experts for the CPU anew: it does so once only, and would read new weights as packed ones."""
    for module in worker.model_runner.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_kept(worker: Any) -> None:
    """Packs again what vLLM has packed for the CPU without giving up the weight itself.

    An output layer tied to the embeddings is not among the names that are loaded: its weight is new, its packed copy not.
    """
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _count_cache(worker: Any) -> int:
    """Bytes of the key-value cache of one of vLLM's workers; layers may share a storage."""
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _load(weights: list[tuple[str, Tensor]], worker: Any) -> None:
    """Runs in each of vLLM's workers."""
    worker.model_runner.get_model().load_weights(weights)
