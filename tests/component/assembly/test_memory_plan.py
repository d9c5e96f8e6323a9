"""The micro-batch that a run chooses once, from the available memory, and the advice if it was too large."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tandem.launch.assembly import memory_plan
from tandem.launch.assembly.memory_plan import KEY, MemoryPlan, advice, groups_of, settle
from tandem.platform.algorithms.registry import resolve
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.planning.memory import Room
from tandem.workers.cluster.postmortem import is_out_of_memory

MIB = 2**20


@dataclass
class Found:
    """A stand-in for a checkpoint; only its settings are read."""

    settings: dict[str, Any] = field(default_factory=dict)


def config(budget: int | None = None, inline: bool = True) -> Config:
    """A configuration of the embedded model with one layer, and 256 samples of at most 96 tokens."""
    made = Config()
    made.model.tiny.layers = 1
    made.adv_estimator, made.algo.name = "grpo", "grpo"
    made.cluster.name = "inline" if inline else "local"
    made.train.max_tokens_per_microbatch = budget
    return made


def settled(made: Config, found: Any, monkeypatch: pytest.MonkeyPatch, room: int = 10**12) -> int | None:
    monkeypatch.setattr(memory_plan, "room_of", lambda *_: Room(room, "this machine"))
    settle(made, found)
    return made.train.max_tokens_per_microbatch


def test_the_default_is_settled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(config(), None, monkeypatch) == 16384
    assert settled(config(500), None, monkeypatch) == 500  # asked for
    small = settled(config(), None, monkeypatch, room=100 * MIB)
    assert small is not None
    assert 96 <= small < 16384
    assert small % 96 == 0
    # A resumed run keeps its micro-batch on any machine.
    assert settled(config(), Found({KEY: 16384}), monkeypatch, room=100 * MIB) == 16384
    assert settled(config(500), Found({KEY: 16384}), monkeypatch) == 500


def test_what_is_chosen_fits_and_twice_as_much_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    small = settled(config(), None, monkeypatch, room=120 * MIB)
    assert small is not None
    [now] = [plan for plan in MemoryPlan(config(small)).roles() if plan.name == "actor"]
    [twice] = [plan for plan in MemoryPlan(config(2 * small)).roles() if plan.name == "actor"]
    assert now.held + (now.working or 0) <= 0.85 * 120 * MIB < twice.held + (twice.working or 0)


def test_too_little_memory_for_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one sequence of 96 tokens, with everything else"):
        settled(config(), None, monkeypatch, room=2 * MIB)


def test_the_nodes_of_a_cluster_are_not_known_before_it_is_joined() -> None:
    made = config(inline=False)
    made.cluster.address = "1.2.3.4:5"
    assert MemoryPlan(made).room is None
    assert MemoryPlan(made).fitting() == (16384, [])


def test_a_model_that_is_not_there_is_left_to_the_checks_of_models() -> None:
    made = config()
    made.model.path = "/no/such/folder"
    assert MemoryPlan(made).fitting() == (16384, [])


def test_a_model_that_cannot_be_rehearsed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise memory_plan.Unknown("it looks into its tensors")

    monkeypatch.setattr(memory_plan, "working_bytes", refuse)
    plan = MemoryPlan(config(inline=False), Room(3000 * MIB, "this machine"))
    plan._process = 100 * MIB  # this process may hold much memory from other tests
    tokens, notes = plan.fitting()
    assert tokens == 16384
    assert any("the passes of the actor are not counted" in note and "it looks into its tensors" in note for note in notes)


def test_who_shares_a_memory() -> None:
    ppo = resolve("ppo", "gae", "clipped_surrogate")
    made = config(inline=False)
    everyone = {"rollout": 1, "reward": 1, "actor": 1, "critic": 1}
    assert groups_of(made, ppo, on_gpu=False) == [everyone]
    # When roles are colocated on a GPU, the engine sleeps while the models train.
    assert groups_of(made, ppo, on_gpu=True) == [{"actor": 1, "critic": 1}, {"rollout": 1}]
    made.placement.takes_turns = False
    assert groups_of(made, ppo, on_gpu=True) == [{"rollout": 1, "actor": 1, "critic": 1}]
    made.placement.name = "split"
    assert groups_of(made, ppo, on_gpu=True) == [{"rollout": 1}, {"actor": 1}, {"critic": 1}]


def test_advice_names_the_setting_and_a_value_that_fits() -> None:
    made = config(16384)
    plan = MemoryPlan(made, Room(100 * MIB, "this machine"))
    said = advice(made, plan, "actor rank 0 died in `update`")
    assert said.startswith(f"Set {KEY}=")
    assert 96 <= int(said.split("=")[1].split()[0]) <= 8192
    said = advice(made, plan, "rollout rank 0 on node a died in `generate`")
    assert said == "Set rollout.max_batch_sequences=128 (was 256)"
    killed = "rollout rank 0 on node a died in `generate`: its process ended. The likely cause is"
    assert advice(made, plan, killed) == "If memory ran out: set rollout.max_batch_sequences=128 (was 256)"
    assert advice(made, plan, "reward rank 0 on node a died in `score`: its process ended.") == ""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError("actor rank 0 died in `update`: killed, most often by the kernel for lack of memory"), True),
        (RuntimeError("actor rank 0 failed in `update`: OutOfMemoryError: CUDA out of memory"), True),
        (RuntimeError("Expected all tensors to be on the same device"), False),
        (KeyError("x"), False),
    ],
)
def test_what_is_a_lack_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
