"""Checks of a run on its model folder and its data, before any role starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models import small_config
from transformers import Qwen2ForCausalLM

from tandem.launch.assembly import inputs
from tandem.launch.assembly.dry_run import dry_run
from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import Config, ConfigError, ModelConfig
from tandem.platform.data.rows import DataError
from tandem.platform.planning.validate import validate
from tandem.platform.rewards.functions import RewardError
from tandem.workers.models.loading import load_policy
from tandem.workers.models.tiny import character_tokenizer
from tandem.workers.models.tokenizer import load_tokenizer

DIGITS = "0123456789+="


def save(folder: Path, characters: str = DIGITS, positions: int = 512, rows: int | None = None) -> str:
    tokenizer = character_tokenizer(characters)
    torch.manual_seed(0)
    config = small_config(rows or len(tokenizer), max_position_embeddings=positions, eos_token_id=None)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def data(folder: Path, *rows: tuple[str, object]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    return str(path)


def test_a_missing_folder_is_called_one(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"model\.path=.*missing cannot be loaded: there is no such folder"):
        inputs.check_context(Config(), missing)
    with pytest.raises(ConfigError, match=r"the tokenizer of .*missing cannot be loaded: there is no such folder"):
        load_tokenizer(missing)


def test_a_sequence_must_fit_the_model_and_the_reward_model(tmp_path: Path) -> None:
    config = Config()
    long, short = save(tmp_path / "long"), save(tmp_path / "short", positions=16)
    inputs.check_context(config, long)
    with pytest.raises(ConfigError, match=r"= 96 tokens, but the model at model\.path=.*short has 16 positions"):
        inputs.check_context(config, short)
    config.reward.model = short
    with pytest.raises(ConfigError, match=r"the model at reward\.model=.*short has 16 positions"):
        inputs.check_context(config, long)


@pytest.mark.parametrize("by_layer_type", [False, True])
def test_rows_of_which_one_would_turn_the_others_are_refused(tmp_path: Path, by_layer_type: bool) -> None:
    """With longrope, one row longer than the original context changes the rotation factors of all rows in its batch."""
    config, path = Config(), save(tmp_path)
    rope: dict[str, object] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
    }
    rope["original_max_position_embeddings"] = 64
    written = json.loads((tmp_path / "config.json").read_text())
    written["rope_parameters"] = {"full_attention": rope} if by_layer_type else rope
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"= 96 tokens, but .* with a row over 64 tokens .* to 64 tokens together"):
        inputs.check_context(config, path)
    config.data.max_prompt_tokens = 64 - config.rollout.max_response_tokens
    inputs.check_context(config, path)


def test_damaged_weights_are_an_error_of_the_folder(tmp_path: Path) -> None:
    weights = Path(save(tmp_path)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"the model at .* cannot be loaded"):
        load_policy(str(tmp_path), ModelConfig())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no tokens"):
        load_tokenizer(path)


def test_a_critic_must_read_the_same_tokens_at_as_many_places(tmp_path: Path) -> None:
    tokenizer, config, actor = character_tokenizer(DIGITS), Config(), save(tmp_path / "actor")
    inputs.check_critic(config, actor, tokenizer)
    config.critic.path = save(tmp_path / "same")
    inputs.check_critic(config, actor, tokenizer)
    config.critic.path = save(tmp_path / "other", characters="9876543210+=")
    with pytest.raises(ConfigError, match=r"critic\.path=.* has another vocabulary than the actor: 10 of its tokens"):
        inputs.check_critic(config, actor, tokenizer)
    config.critic.path = save(tmp_path / "short", positions=16)
    with pytest.raises(ConfigError, match=r"the model at critic\.path=.* has 16 positions"):
        inputs.check_critic(config, actor, tokenizer)


def test_a_critic_must_have_an_embedding_for_every_token_that_the_actor_reads_or_samples(tmp_path: Path) -> None:
    tokenizer, config, actor = character_tokenizer(DIGITS), Config(), save(tmp_path / "actor", rows=20)
    config.critic.path = save(tmp_path / "narrow", rows=19)
    with pytest.raises(ConfigError, match=r"narrow has 19 embedding rows.*the actor's tokens go up to 19.*to 20 rows"):
        inputs.check_critic(config, actor, tokenizer)
    config.critic.path = save(tmp_path / "wide", rows=20)
    inputs.check_critic(config, actor, tokenizer)
    tokenizer.add_tokens([f"<new {number}>" for number in range(6)])  # the last one is token 20
    tokenizer.save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"wide has 20 embedding rows.*go up to 20.*to 21 rows"):
        inputs.check_critic(config, actor, tokenizer)


def test_a_stop_token_must_exist(tmp_path: Path) -> None:
    """A stop token must be in the model's vocabulary, which may be larger or smaller than the tokenizer's."""
    tokenizer, config = character_tokenizer(DIGITS), Config()
    wide, narrow = save(tmp_path / "wide", rows=20), save(tmp_path / "narrow", rows=14)
    config.rollout.stop_token_ids = [3, len(tokenizer) - 1, 19]
    inputs.check_stop_ids(config, wide, tokenizer)
    config.rollout.stop_token_ids = [3, 20, -1]
    with pytest.raises(ConfigError, match=r"stop_token_ids: 20, -1 cannot occur: .* 20 tokens, 0 to 19.*tokenizer has 15"):
        inputs.check_stop_ids(config, wide, tokenizer)
    config.rollout.stop_token_ids = [14]
    with pytest.raises(ConfigError, match=r"stop_token_ids: 14 cannot occur: .* 14 tokens, 0 to 13.*tokenizer has 15"):
        inputs.check_stop_ids(config, narrow, tokenizer)


def test_an_end_token_that_the_model_cannot_sample_is_refused(tmp_path: Path) -> None:
    tokenizer, config, path = character_tokenizer(DIGITS), Config(), save(tmp_path)
    tokenizer.add_special_tokens({"eos_token": "<stop>"})
    assert tokenizer.eos_token_id == 15
    with pytest.raises(ConfigError, match=r"no response could ever end: the end token 15 cannot occur.*0 to 14"):
        inputs.check_stop_ids(config, path, tokenizer)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_prompt_with_a_token_that_the_model_lacks_is_named_with_its_row(tmp_path: Path, held_out: bool) -> None:
    """A token was added without resizing the embedding; only prompts with this token are refused."""
    tokenizer, config, path = character_tokenizer(DIGITS), Config(), save(tmp_path)
    tokenizer.add_tokens(["<tool>"])
    config.data.train = config.data.eval = data(tmp_path, ("1+1=", "2"), ("1+<tool>=", "3"), ("<tool>", "4"))
    read = inputs.evaluations if held_out else inputs.training_prompts
    with pytest.raises(DataError, match=r"data\.jsonl, line 2: .* token 15 \('<tool>'\).* 15 embedding rows.*16 tokens"):
        read(config, path, tokenizer, print)
    config.data.train = config.data.eval = data(tmp_path, ("1+1=", "2"))
    read(config, path, tokenizer, print)


@pytest.mark.parametrize(
    ("function", "answer", "said"),
    [("exact_match", None, "has no answer"), ("last_number", "a dozen", "needs a number as the answer")],
)
def test_an_answer_that_cannot_be_graded_is_found_when_it_is_read(
    tmp_path: Path, function: str, answer: str | None, said: str
) -> None:
    config = Config()
    config.data.train = data(tmp_path, ("1+1=", "2"), ("1+2=", answer))
    config.reward.functions = {function: 1.0}
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2: reward function '{function}' cannot grade .*{said}"):
        inputs.training_prompts(config, "", character_tokenizer(DIGITS), print)
    config.reward.allow_errors = True
    model = save(tmp_path / "model")
    assert len(inputs.training_prompts(config, model, character_tokenizer(DIGITS), print).rows) == 2


def test_prompts_in_unknown_characters_are_counted(tmp_path: Path) -> None:
    config, notes = Config(), list[str]()
    config.data.train = data(tmp_path, ("1+1=", "2"), ("1 + 2 =", "3"))
    inputs.training_prompts(config, save(tmp_path / "model"), character_tokenizer(DIGITS), notes.append)
    [note] = notes
    assert "1 of 2 prompts have characters that the model's tokenizer does not know" in note


def planned(*overrides: str) -> str:
    config, given = compose(["cluster=inline", *overrides])
    validate(config, given)
    return dry_run(config, print)


def test_a_dry_run_reads_what_a_run_would_read(tmp_path: Path) -> None:
    model, rows = save(tmp_path / "model"), data(tmp_path, ("1+1=", "2"), ("12+3=", "15"), ("9+9=", "18"))
    mine = tmp_path / "mine.py"
    mine.write_text("def score(sample):\n    return 1.0\n")
    own = [f"model.path={model}", f"data.train={rows}", f"data.eval={rows}", "run.epochs=2", "data.prompts_per_step=1"]
    plan = planned(*own, f"reward.function={mine}:score", "rollout.max_response_tokens=16", "data.max_prompt_tokens=8")
    lines = [line.split() for line in plan.splitlines()]
    assert ["train", "3", "4", "to", "5", "'1+1='", "'9+9='"] in lines
    assert ["training", "steps", "6", "steps"] in lines
    assert ["data", "3", "4", "to", "5", "'1+1='", "'9+9='"] in lines


def test_a_dry_run_refuses_what_a_run_would_refuse(tmp_path: Path) -> None:
    model, rows = save(tmp_path / "model"), data(tmp_path, ("1+1=", "2"))
    own = [f"model.path={model}", "rollout.max_response_tokens=16", "data.max_prompt_tokens=8", "data.prompts_per_step=1"]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": }\n')
    with pytest.raises(DataError, match=r"broken\.jsonl, line 2, column 30"):
        planned(*own, f"data.train={broken}")
    mine = tmp_path / "mine.py"
    mine.write_text("def score(sample:\n    return 1.0\n")
    with pytest.raises(RewardError, match=r"could not import .*mine\.py:1: SyntaxError"):
        planned(*own, f"data.train={rows}", f"reward.function={mine}:score")
    mine.write_text("def other(sample):\n    return 1.0\n")
    with pytest.raises(RewardError, match=r"mine\.py"):
        planned(*own, f"data.train={rows}", f"eval.function={mine}:score")
    with pytest.raises(DataError, match="no such file"):
        planned(*own, f"data.train={rows}", f"data.eval={tmp_path / 'none.jsonl'}")
    with pytest.raises(ConfigError, match=r"reward\.model=.*none cannot be loaded"):
        planned(*own, f"data.train={rows}", f"reward.model={tmp_path / 'none'}")
