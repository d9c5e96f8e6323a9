"""A policy is its whole state, buffers included: in training, checkpoints, exports and rollout engines alike."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_types import initialised, small_config_of
from transformers import AutoModelForCausalLM

from tandem.launch import export
from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose
from tandem.launch.storage.checkpoints import open_newest
from tandem.platform.config.schema import ActorConfig, ModelConfig, RolloutConfig, TrainerConfig
from tandem.platform.loop.checksum import checksum
from tandem.workers.cluster.runtime import Rank, Rendezvous
from tandem.workers.engines.hf import HFEngine
from tandem.workers.models.loading import load_policy, saved_buffers, saved_tensors
from tandem.workers.models.tiny import character_tokenizer
from tandem.workers.training.deepspeed import DeepSpeedBackend
from tandem.workers.training.state import StateError

CPU = torch.device("cpu")
BIAS = "e_score_correction_bias"
"""A saved buffer: what the router of a DeepSeek-V3 adds to its scores."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small DeepSeek-V3 whose router has a correction buffer that determines the chosen experts."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), character_tokenizer("0123456789+=")
    config = small_config_of("deepseek_v3", rate=0.0)
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), tokenizer.eos_token_id, 0
    model = initialised(AutoModelForCausalLM.from_config(config))
    for number, buffer in enumerate(saved_buffers(model).values()):
        buffer.copy_(torch.tensor([5.0, -3.0, 0.0, 4.0]).roll(number))
    assert any(BIAS in name for name in saved_buffers(model))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def backend(model: Any, stage: int = 0, dtype: str = "float32") -> DeepSpeedBackend:
    meeting = Rendezvous(1, 60)
    trainer, config = TrainerConfig(zero_stage=stage, bucket_mb=1), ModelConfig(dtype=dtype)
    rank, place = Rank(threads=1), (meeting.address, meeting, 60.0)
    return DeepSpeedBackend(model, "actor", ActorConfig(), trainer, config, rank, CPU, place)


def whole(parts: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "later"), [(0, 0), (1, 3), (3, 0)])
def test_buffers_are_saved_sent_and_taken_up_again(path: str, stage: int, later: int, dtype: str) -> None:
    model = load_policy(path, ModelConfig(dtype=dtype))
    expected = {name: buffer.clone() for name, buffer in saved_buffers(model).items()}
    own = backend(model, stage, dtype)
    state, sent = whole(own.state_parts()), whole(own.named_weights(1 << 20))
    assert {name.partition("/")[2]: t for name, t in state.items() if name.startswith("fixed/")}.keys() == expected.keys()
    for name, buffer in expected.items():
        assert state[f"fixed/{name}"].dtype == buffer.dtype
        assert torch.equal(state[f"fixed/{name}"], buffer)
        assert torch.equal(sent[name], buffer)
    other = load_policy(path, ModelConfig(dtype=dtype))
    for buffer in saved_buffers(other).values():
        buffer.zero_()
    into = backend(other, later, dtype)
    into.begin_load(0)
    into.load_part(state)
    into.end_load(0)
    assert all(torch.equal(saved_buffers(into.engine.module)[name], buffer) for name, buffer in expected.items())
    into.begin_load(0)
    into.load_part({name: tensor for name, tensor in state.items() if BIAS not in name})
    with pytest.raises(StateError, match=f"lacks .*fixed/.*{BIAS}"):
        into.end_load(0)


def test_bfloat16_leaves_buffers_as_they_were(path: str) -> None:
    """Rotary frequencies rounded to 8 bits would be off by whole turns after a thousand tokens."""
    model = load_policy(path, ModelConfig(dtype="bfloat16"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    frequencies = [name for name in before if name.endswith("inv_freq")]
    assert frequencies
    assert all(before[name].dtype == torch.float32 for name in frequencies)
    after = dict(backend(model, dtype="bfloat16").engine.module.named_buffers())
    assert all(after[name].dtype == buffer.dtype and torch.equal(after[name], buffer) for name, buffer in before.items())


def test_a_parameter_that_is_not_trained_is_part_of_the_state(path: str) -> None:
    model = load_policy(path, ModelConfig())
    model.lm_head.weight.requires_grad_(False)
    state = whole(backend(model).state_parts())
    assert torch.equal(state["fixed/lm_head.weight"], model.lm_head.weight)
    assert "weights/lm_head.weight" not in state


def test_the_engine_takes_buffers_and_answers_with_their_checksums(path: str) -> None:
    engine = HFEngine(path, ModelConfig(), RolloutConfig(), CPU)
    source = {name: tensor.detach() + 1 for name, tensor in saved_tensors(load_policy(path, ModelConfig())).items()}
    arrived = engine.load_weights(source)
    engine.finish_weights()
    assert arrived == {name: checksum(tensor) for name, tensor in source.items()}
    assert all(torch.equal(tensor, source[name]) for name, tensor in saved_tensors(engine.model).items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_is_the_policy_that_was_trained(path: str, tmp_path: Path, dtype: str) -> None:
    """The export gives the trained policy's log-probs, and the run sampled from the same policy."""
    own = [f"model.path={path}", f"run.dir={tmp_path}", "run.name=r", "run.steps=2", "cluster=inline", "algo=grpo"]
    own += [
        "tracking.console=none",
        "rollout.max_response_tokens=6",
        "data.max_prompt_tokens=32",
        "data.prompts_per_step=4",
        "actor.lr=0.01",
    ]
    own += ["task.eval_size=2", "reward.functions={matching_characters: 1.0}", "checkpoint.every=1", f"model.dtype={dtype}"]
    config, _ = compose(own)
    assert run(config, time.time()) == 0
    steps = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    gap = max(step["rollout/logprob_gap"] for step in steps if "rollout/logprob_gap" in step)
    assert gap < (1e-4 if dtype == "float32" else 0.05)
    export.export(str(tmp_path / "r" / "checkpoints"), tmp_path / "out", dtype="float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    trained = load_policy(path, ModelConfig())
    state = whole(open_newest(str(tmp_path / "r" / "checkpoints")).parts("actor"))
    for name, tensor in saved_tensors(trained).items():
        tensor.data.copy_(state[f"fixed/{name}" if BIAS in name else f"weights/{name}"])
    tokens = torch.randint(3, 15, (4, 12), generator=torch.Generator().manual_seed(0))
    one, other = (model.eval()(tokens).logits.log_softmax(-1) for model in (exported, trained))
    assert float((one - other).abs().max()) < 1e-5
    assert all(float(buffer.abs().sum()) > 0 for name, buffer in saved_buffers(exported).items() if BIAS in name)
