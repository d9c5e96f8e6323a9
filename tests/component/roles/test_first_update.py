"""Properties that hold from the first update on, in the real loop with every role in this process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose
from tandem.platform.planning.validate import validate
from tandem.workers.models.tiny import character_tokenizer

Steps = list[dict[str, Any]]


def steps_of(path: str, folder: Path, *overrides: str, count: int = 3) -> Steps:
    """The records of a run of this many steps with the small random model."""
    fixed = [f"model.path={path}", f"run.dir={folder}", "run.name=r", f"run.steps={count}", "cluster=inline"]
    small = [
        "data.prompts_per_step=6",
        "data.max_prompt_tokens=64",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=6",
    ]
    quiet = ["tracking.console=none", "eval.before_training=false", "actor.lr=0.01", "task.eval_size=2"]
    config, given = compose([*fixed, *small, *quiet, *overrides])
    validate(config, given)
    assert run(config, time.time()) == 0
    lines = (folder / "r" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


DENSE = "reward.functions={matching_characters: 1.0}"
"""A reward in which the responses of a random model differ."""


@pytest.mark.parametrize("algo", ["ppo", "grpo", "gspo", "cispo", "rloo", "reinforce_pp", "remax", "vapo"])
def test_the_first_update_is_on_policy(tiny_path: str, tmp_path: Path, algo: str) -> None:
    own = ["critic.warmup_steps=0"] if algo == "vapo" else []
    first, second, third = steps_of(tiny_path, tmp_path, f"algo={algo}", DENSE, "algo.kl_loss_coef=0.01", *own)
    for step in (first, second, third):  # one update per batch, so every update is a first update
        assert step["policy/ratio_gap_max"] < 1e-4
        assert step["policy/clip_frac"] == 0
        assert step["rollout/logprob_gap"] < 1e-4
        assert step["samples/sampled"] == step["samples/trained"] + step["samples/filtered"] + step["samples/leftover"]
    assert abs(first["policy/kl"]) < 1e-6
    assert min(second["policy/kl"], third["policy/kl"]) > 1e-4
    assert third["update/unmoved_tensors"] == 0


def test_a_model_with_dropout_is_on_policy_too(tmp_path: Path) -> None:
    """OPT layers keep their dropout rate as a plain number; with dropout, ratios of the first update would reach 3."""
    tokenizer = character_tokenizer("0123456789+=")
    sizes = {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.1}
    config = OPTConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **rates, **sizes)
    config.eos_token_id = tokenizer.eos_token_id
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    tokenizer.save_pretrained(tmp_path / "opt")
    for step in steps_of(str(tmp_path / "opt"), tmp_path, "algo=ppo", DENSE, "model.gradient_checkpointing=true"):
        assert step["policy/ratio_gap_max"] < 1e-4
        assert step["policy/clip_frac"] == 0
        assert step["rollout/logprob_gap"] < 1e-4


def test_a_later_update_of_the_same_batch_is_off_policy(tiny_path: str, tmp_path: Path) -> None:
    [step] = steps_of(tiny_path, tmp_path, "algo=grpo", DENSE, "train.epochs_per_batch=2", count=1)
    assert step["policy/ratio_gap_max"] > 1e-3
    assert step["policy/epochs"] == 2


def test_epochs_stop_at_the_kl_target(tiny_path: str, tmp_path: Path) -> None:
    more = ["train.epochs_per_batch=4", "algo.kl_stop=1e-4"]
    [step] = steps_of(tiny_path, tmp_path, "algo=grpo", DENSE, *more, count=1)
    assert step["policy/epochs"] == 2  # in the first epoch, the policy still equals the old policy


def test_a_kl_penalty_in_the_reward_is_steered_to_its_target(tiny_path: str, tmp_path: Path) -> None:
    more = ["algo.kl_reward_coef=0.1", "algo.kl_target=10", "algo.kl_horizon=240"]
    steps = steps_of(tiny_path, tmp_path, "algo=reinforce_pp", DENSE, *more)
    assert [step["kl/coef"] for step in steps] == pytest.approx([0.1, 0.098, 0.09604])  # 24 of 240 samples, error -0.2
    assert "policy/kl" in steps[0]


def test_engine_and_trainer_agree_so_their_weights_are_one(tiny_path: str, tmp_path: Path) -> None:
    steps = steps_of(tiny_path, tmp_path, "algo=grpo", DENSE, "algo.correction=truncate", "rollout.temperature=0.7")
    for step in steps:
        assert step["correction/mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["correction/ess_frac"] > 0.999
        assert step["correction/masked_frac"] == 0


def test_stale_samples_are_corrected(tiny_path: str, tmp_path: Path) -> None:
    steps = steps_of(tiny_path, tmp_path, "algo=grpo", DENSE, "algo.correction=mask", "rollout.max_staleness=1", count=4)
    assert steps[0]["correction/ess_frac"] > 0.999
    assert steps[2]["rollout/staleness_mean"] == 1
    assert steps[2]["correction/ess_frac"] < 0.999
    assert steps[2]["correction/max"] > 1.001


def test_the_overlong_penalty_shows_in_the_reward(tiny_path: str, tmp_path: Path) -> None:
    plain = steps_of(tiny_path, tmp_path / "a", "algo=grpo", DENSE, count=1)[0]
    shaped = steps_of(tiny_path, tmp_path / "b", "algo=grpo", DENSE, "reward.overlong_penalty=1", count=1)[0]
    assert plain["response/truncated_frac"] > 0
    assert shaped["reward/overlong_penalty"] < 0
    assert shaped["reward/mean"] == pytest.approx(plain["reward/mean"] + shaped["reward/overlong_penalty"])
    assert shaped["reward/accuracy"] == pytest.approx(plain["reward/mean"])


def test_dynamic_sampling_trains_only_on_groups_with_signal(tiny_path: str, tmp_path: Path) -> None:
    steps = steps_of(tiny_path, tmp_path, "algo=dapo", "algo.overlong_filter=false", "algo.dynamic_max_rounds=2")
    for step in steps:  # a random model is never right, so no group has any
        assert step["samples/sampled"] == 48
        assert step["samples/filtered"] == 48
        assert step["samples/trained"] == 0
        assert "policy/loss" not in step


def test_process_rewards_reach_the_advantages(tiny_path: str, tmp_path: Path) -> None:
    steps = steps_of(tiny_path, tmp_path, "adv_estimator=grpo_process", "algo.whiten_advantages=false", DENSE)
    assert all(step["update/unmoved_tensors"] == 0 for step in steps)
    assert steps[0]["reward/matching_characters"] == pytest.approx(steps[0]["reward/mean"])
