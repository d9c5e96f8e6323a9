"""The calls of the vllm engine to vLLM on CUDA, with a fake vLLM: the tests need neither a GPU nor vLLM."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.platform.config.schema import ConfigError, ModelConfig, RolloutConfig
from tandem.platform.loop.checksum import checksum
from tandem.workers.engines import vllm as vllm_engine
from tandem.workers.engines.running_batch import RunningBatch
from tandem.workers.engines.vllm import VLLMEngine
from tandem.workers.models.checkpoint_names import CheckpointNames


class Stand:
    """A fake vLLM engine that records its calls and runs functions on a worker with a model."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.loaded: dict[str, torch.Tensor] = {}
        model = SimpleNamespace(load_weights=self.loaded.update)
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))

    def collective_rpc(self, function: Any, **_: Any) -> None:
        assert not isinstance(function, str), "weights are loaded as they come, not reloaded as a whole"
        function(self.worker)

    def reset_prefix_cache(self, **options: Any) -> None:
        self.calls.append(("reset", options))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", tags))


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def engine(stand: Stand) -> VLLMEngine:
    made = VLLMEngine.__new__(VLLMEngine)
    made.device, made.engine = torch.device("cuda", 0), stand
    made._batch, made._held, made._is_loading = RunningBatch(stand), {}, False
    made._names = CheckpointNames(torch.nn.Module())
    return made


def test_each_bucket_is_loaded_when_it_comes(engine: VLLMEngine, stand: Stand) -> None:
    for name in ("a", "b"):
        tensor = torch.randn(3, 4)
        assert engine.load_weights({name: tensor}) == {name: checksum(tensor)}
        assert torch.equal(stand.loaded[name], tensor)
    engine.finish_weights()
    assert stand.calls == [("reset", {"reset_running_requests": True})]


def test_no_token_comes_from_half_new_weights(engine: VLLMEngine, stand: Stand) -> None:
    """A running request takes steps before and after a weight update, but none between the buckets."""
    steps: list[tuple[str, ...]] = []
    stop = threading.Event()

    def step() -> list[Any]:
        steps.append(tuple(sorted(stand.loaded)))  # the weights that a token sampled now would come from
        time.sleep(0.001)
        done = SimpleNamespace(request_id="0", finished=stop.is_set())
        return [done]

    stand.step, stand.add_request = step, lambda *request: None  # type: ignore[attr-defined]
    running = threading.Thread(target=engine._batch.run, args=([([1], None)],), daemon=True)
    running.start()
    for name in ("a", "b", "c"):
        while not steps:
            time.sleep(0.001)
        engine.load_weights({name: torch.ones(1)})
        time.sleep(0.02)
    engine.finish_weights()
    seen = len(steps)
    while len(steps) < seen + 3:
        time.sleep(0.001)
    stop.set()
    running.join(5)
    assert set(steps) == {(), ("a", "b", "c")}


def test_an_update_may_begin_again(engine: VLLMEngine, stand: Stand) -> None:
    """A replica that missed a bucket receives all buckets again."""
    engine.load_weights({"a": torch.zeros(1)})
    engine.load_weights({"a": torch.ones(1)})
    engine.finish_weights()
    engine.finish_weights()
    assert stand.loaded["a"] == 1
    with engine._batch.paused():
        pass


def test_memory_sleeps_and_wakes_in_stages(engine: VLLMEngine, stand: Stand) -> None:
    engine.sleep()
    engine.wake("weights")
    engine.wake("cache")
    assert stand.calls == [("sleep", 1), ("wake", ["weights"]), ("wake", ["kv_cache"])]


def test_weights_wait_for_the_step_that_runs(engine: VLLMEngine, stand: Stand) -> None:
    with engine._batch.paused():
        loading = threading.Thread(target=engine.load_weights, args=({"a": torch.ones(1)},))
        loading.start()
        loading.join(0.05)
        assert not stand.loaded
    loading.join(5)
    assert set(stand.loaded) == {"a"}
    engine.finish_weights()


def test_settings_in_vllms_words() -> None:
    rollout = RolloutConfig(gpu_memory_share=0.3, tensor_parallel=2, max_batch_sequences=64, prefix_caching=False)
    gpu = vllm_engine._arguments("m", ModelConfig(dtype="bfloat16"), rollout, on_cpu=False)
    assert (gpu["gpu_memory_utilization"], gpu["tensor_parallel_size"], gpu["max_num_seqs"]) == (0.3, 2, 64)
    assert (gpu["distributed_executor_backend"], gpu["enable_sleep_mode"], gpu["enforce_eager"]) == ("mp", True, False)
    assert (gpu["enable_prefix_caching"], gpu["dtype"]) == (False, "bfloat16")
    assert not {"kv_cache_memory_bytes", "max_model_len"} & set(gpu)
    cpu = vllm_engine._arguments("m", ModelConfig(), RolloutConfig(kv_cache_gb=0.5, max_model_tokens=96), on_cpu=True)
    assert (cpu["kv_cache_memory_bytes"], cpu["max_model_len"], cpu["dtype"]) == (2**29, 96, "float32")
    assert (cpu["distributed_executor_backend"], cpu["enable_sleep_mode"], cpu["enforce_eager"]) == ("uni", False, True)


def test_several_gpus_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel=2 needs as many GPUs"):
        vllm_engine._start("m", ModelConfig(), RolloutConfig(tensor_parallel=2), torch.device("cpu"))
