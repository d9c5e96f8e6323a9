"""The plan that dry_run prints: roles, memory, sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.platform.algorithms.registry import Algorithm, resolve
from tandem.platform.config.schema import Config
from tandem.platform.planning.plan import RolePlan, batch_table, render, role_plans, role_ranks
from tandem.platform.system.text import human_bytes, table

PPO, GRPO = resolve("ppo", "gae", "clipped_surrogate"), resolve("grpo", "grpo", "clipped_surrogate")


def config() -> Config:
    result = Config()
    result.actor.ranks, result.critic.ranks, result.rollout.replicas = 2, 3, 4
    return result


def test_roles_follow_from_the_algorithm_and_the_kl_terms() -> None:
    plain = {"rollout": 4, "reward": 1, "actor": 2}
    assert role_ranks(config(), GRPO) == plain
    assert role_ranks(config(), PPO) == {**plain, "critic": 3}
    with_kl = config()
    with_kl.algo.kl_loss_coef = 0.1
    assert role_ranks(with_kl, GRPO) == {**plain, "reference": 2}


@pytest.mark.parametrize(
    ("dtype", "stage", "weights", "gradients", "optimizer"),
    [
        # 1001 parameters over 2 ranks: shards of 501. float32: 4 bytes, moments 8, copy of the weights 4
        ("float32", 0, 4004, 4004, 8008),
        ("float32", 1, 4004, 4004, 501 * 12),
        ("float32", 2, 4004, 501 * 4, 501 * 12),
        ("float32", 3, 501 * 4, 501 * 4, 501 * 12),
        ("bfloat16", 0, 2002, 2002, 12012),
        ("bfloat16", 3, 1002, 1002, 501 * 12),
    ],
)
def test_memory_of_a_trained_role(dtype: str, stage: int, weights: int, gradients: int, optimizer: int) -> None:
    wanted = config()
    wanted.model.dtype, wanted.trainer.zero_stage = dtype, stage
    plans = {plan.name: plan for plan in role_plans(wanted, PPO, 1001)}
    assert plans["actor"] == RolePlan("actor", 2, weights, gradients, optimizer)
    assert plans["actor"].bytes_per_rank == weights + gradients + optimizer
    assert plans["reward"].bytes_per_rank == 0
    assert plans["rollout"] == RolePlan("rollout", 4, 1001 * (4 if dtype == "float32" else 2))


@pytest.mark.parametrize(
    ("dtype", "stage", "bytes_"),
    [("float32", 0, 8008), ("float32", 1, 501 * 12), ("bfloat16", 0, 501 * 12 + 2002), ("bfloat16", 2, 501 * 12 + 2002)],
)
def test_an_optimizer_step_may_take_more_than_a_pass(dtype: str, stage: int, bytes_: int) -> None:
    """Optimizer steps of 1001 parameters over 2 ranks, beside passes that need less or more memory."""
    wanted = config()
    wanted.model.dtype, wanted.trainer.zero_stage = dtype, stage
    for passes, working in ((10, bytes_), (10**6, 10**6)):
        plans = {plan.name: plan for plan in role_plans(wanted, PPO, 1001, {"actor": passes, "rollout": 3})}
        assert (plans["actor"].working, plans["rollout"].working, plans["critic"].working) == (working, 3, 0)


def test_without_a_critic_no_byte_of_one_is_planned() -> None:
    assert "critic" not in [plan.name for plan in role_plans(config(), GRPO, 1001)]


def test_batch_table() -> None:
    wanted = config()
    wanted.data.prompts_per_step, wanted.rollout.samples_per_prompt = 6, 4
    wanted.train.minibatches, wanted.train.epochs_per_batch = 2, 3
    wanted.train.max_tokens_per_microbatch = 200  # two sequences of 64 + 32 tokens
    rows = {what: number for what, number, _ in batch_table(wanted, 1000)}
    assert rows == {
        "prompts per step": "6",
        "samples per prompt (G)": "4",
        "samples per step": "24",
        "samples per mini-batch": "12",
        "optimizer steps per step": "6",
        "longest sequence": "96",
        "micro-batch": "200",
        "micro-batches per mini-batch": "3",  # 6 rows per rank, two at a time
        "training steps": "1,000",
        "optimizer steps in all": "6,000",
    }
    assert len(batch_table(wanted, None)) == 8


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (12345678, "11.8 MiB"), (2**30, "1.0 GiB"), (2**40, "1.0 TiB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_table_aligns_columns() -> None:
    assert table([["a", "b"], ["long", "x"]], indent="") == "a     b\nlong  x"


def text_of(algorithm: Algorithm, steps: int | None, bundles: list[dict[str, float]], **notes: Any) -> str:
    plans = role_plans(config(), algorithm, 1_000_000, notes.pop("working", None))
    return render(config(), algorithm, steps, 1_000_000, bundles, {"tandem": "0.1.0"}, plans, **notes)


def test_render_of_a_run_with_and_without_a_critic() -> None:
    ppo, grpo = (text_of(algorithm, 10, [{"CPU": 2.0}]) for algorithm in (PPO, GRPO))
    assert "with a critic" in ppo
    assert "no critic" in grpo
    assert any(line.split()[:2] == ["critic", "3"] for line in ppo.splitlines())
    assert not any(line.split()[:1] == ["critic"] for line in grpo.splitlines())
    assert "tandem  0.1.0" in ppo


def test_render_of_passes_that_are_counted_and_that_are_not() -> None:
    text = text_of(GRPO, 10, [], working={"actor": 2**30, "rollout": None}, notes=["the words"])
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert rows["actor"].split()[-4:] == ["1.0", "GiB", "1.0", "GiB"]
    assert rows["rollout"].endswith("not counted  over 3.8 MiB")
    assert "\nthe words\n" in text


def test_what_a_rank_needs_in_all() -> None:
    plan = RolePlan("actor", 2, 1, 2, 4, working=8, process=16)
    assert (plan.held, plan.bytes_per_rank) == (7, 31)
    assert RolePlan("actor", 2, 1, working=None).bytes_per_rank == 1


def test_render_of_bundles_of_different_kinds() -> None:
    text = text_of(GRPO, None, [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}])
    lines = [line.split() for line in text.splitlines()]
    assert ["bundle", "CPU", "GPU"] in lines
    assert ["0", "2", "0"] in lines
    assert ["1", "2", "1"] in lines


def test_render_without_bundles() -> None:
    assert "none: all roles share this process" in text_of(GRPO, None, [])
