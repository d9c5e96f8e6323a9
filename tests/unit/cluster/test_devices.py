"""A rank uses the device that Ray assigned, however many devices of the node it can see."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.platform.config.schema import ActorConfig, ModelConfig, RolloutConfig, TrainerConfig
from tandem.workers.cluster import runtime
from tandem.workers.cluster.runtime import Rank, Rendezvous, device_indices, own_interface
from tandem.workers.training.deepspeed import DeepSpeedBackend


@pytest.mark.parametrize(
    ("given", "visible", "noset", "expected"),
    [
        ([], None, False, []),  # outside Ray
        (["3"], "3", False, [0]),  # Ray shows the process only its own device
        (["2", "5"], "2,5", False, [0, 1]),
        (["3"], None, True, [3]),  # the process sees all devices of the node
        (["2", "5"], None, True, [2, 5]),
        (["6"], "4,6,7", True, [1]),  # the node itself is limited to three devices
        (["7", "6"], "4, 6, 7", True, [2, 1]),
        (["GPU-b"], "GPU-a,GPU-b", True, [1]),
        ([], "4,6", True, []),  # a rank without a device of its own
    ],
)
def test_device_indices(given: list[str], visible: str | None, noset: bool, expected: list[int]) -> None:
    assert device_indices(given, visible, noset) == expected


def test_deepspeed_takes_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process sees several devices and its rank has the third, DeepSpeed names and chooses only the third."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    chosen: list[int] = []
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "set_device", lambda index: chosen.append(int(index)))
    monkeypatch.setattr(accelerator, "device_name", lambda index=None: _named(index, chosen))
    meeting = Rendezvous(1, 60)
    backend = DeepSpeedBackend(
        torch.nn.Linear(2, 1),
        "actor",
        ActorConfig(),
        TrainerConfig(),
        ModelConfig(),
        Rank(threads=1),
        torch.device("cpu", 2),  # torch accepts an index for a CPU; here it only affects the chosen device
        (meeting.address, meeting, 60),
    )
    assert os.environ["LOCAL_RANK"] == "2"
    assert backend.engine.local_rank == 2
    assert set(chosen) == {2}


def _named(index: Any, chosen: list[int]) -> str:
    if index is not None:
        chosen.append(int(index))
    return "cpu"


@pytest.mark.parametrize(
    ("device", "parallel", "given", "expected"),
    [(2, 1, [2], [12]), (0, 1, [], [10]), (2, 2, [2, 3], [12, 13]), (0, 2, [], None)],
)
def test_vllm_takes_the_devices_of_the_replica(
    monkeypatch: pytest.MonkeyPatch, device: int, parallel: int, given: list[int], expected: list[int] | None
) -> None:
    """vLLM knows devices by their number in the machine, here 10 more than their place in the process."""
    vllm = pytest.importorskip("vllm")
    from vllm.engine.llm_engine import LLMEngine

    from tandem.workers.engines import vllm as vllm_engine

    settings = SimpleNamespace(parallel_config=SimpleNamespace(assigned_physical_gpu_ids=None))
    monkeypatch.setattr(vllm.EngineArgs, "create_engine_config", lambda self: settings)
    monkeypatch.setattr(LLMEngine, "from_vllm_config", lambda settings, disable_log_stats: settings)
    platform = SimpleNamespace(visible_device_id_to_physical_device_id=lambda index: 10 + index)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(vllm_engine, "own_device_indices", lambda: given)
    monkeypatch.setattr(vllm_engine, "_arguments", lambda *settings: {})
    started = vllm_engine._start("m", ModelConfig(), RolloutConfig(tensor_parallel=parallel), torch.device("cuda", device))
    assert started.parallel_config.assigned_physical_gpu_ids == expected


@pytest.mark.parametrize(("before", "inside"), [(None, "lo"), ("eth7", "eth7")])
def test_ranks_meet_on_the_network_of_their_address(
    monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str
) -> None:
    """Restores the environment afterwards, because the interfaces of other nodes may have other names."""
    monkeypatch.setattr(runtime, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")
    if before is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with own_interface():
        assert os.environ["GLOO_SOCKET_IFNAME"] == inside
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
