"""An engine that expects checkpoint names gets them, however the trainer splits the weights into buckets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from causal_types import initialised
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tandem.workers.models.checkpoint_names import CheckpointNames
from tandem.workers.models.tiny import character_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
KINDS = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": []}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
}
"""Types whose experts are one tensor in transformers and many in a checkpoint."""
SYNC = """
import sys
import torch
from tandem.platform.experience.batch import Prompt
from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.platform.loop.protocols import Sampling
from tandem.workers.models.loading import load_policy, saved_tensors
from tandem.workers.engines.vllm import VLLMEngine

policy, prompt = load_policy(sys.argv[1], ModelConfig()).eval(), (5, 6, 7, 8)
rollout = RolloutConfig(kv_cache_gb=0.1, max_model_tokens=64, max_batch_sequences=8)
engine = VLLMEngine(sys.argv[1], ModelConfig(), rollout, torch.device("cpu"))
for update in range(3):
    worst = 0.0
    for one in engine.generate([Prompt(prompt, 0, "")], Sampling(2, 1.0, 8, (0,))):
        tokens = torch.tensor([[*prompt, *one.ids]])
        with torch.no_grad():
            logprobs = policy(tokens).logits.log_softmax(-1)[0, 3:-1].gather(1, tokens[0, 4:, None])[:, 0]
        worst = max(worst, float((logprobs - torch.tensor(one.logprobs)).abs().max()))
    print("gap", worst, flush=True)
    torch.manual_seed(update)
    for name, tensor in saved_tensors(policy).items():
        tensor.data.add_(torch.randn_like(tensor) * 0.1)
        engine.load_weights({name: tensor.detach()})
    engine.finish_weights()
"""


def model(kind: str) -> torch.nn.Module:
    config, own = KINDS[kind]
    return initialised(AutoModelForCausalLM.from_config(config(vocab_size=15, **SIZES, **own)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_buckets_become_what_is_saved(tmp_path: Path, kind: str, size: int) -> None:
    own = model(kind)
    own.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert expected.keys() != dict(own.named_parameters()).keys()
    names, named = CheckpointNames(own), [(name, tensor.detach()) for name, tensor in own.named_parameters()]
    found: dict[str, torch.Tensor] = {}
    for start in range(0, len(named), size):
        found |= names.of(dict(named[start : start + size]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_samples_from_the_experts_that_were_sent(tmp_path: Path, kind: str) -> None:
    """Before and after two updates, vLLM's log-probs of its samples equal the trainer's."""
    pytest.importorskip("vllm")
    model(kind).save_pretrained(tmp_path)  # type: ignore[operator]
    character_tokenizer("0123456789+=").save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", SYNC, str(tmp_path)], capture_output=True, text=True, timeout=300)
    gaps = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("gap")]
    assert len(gaps) == 3, done.stderr[-3000:]
    assert max(gaps) < 1e-4
