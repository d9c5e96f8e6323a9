"""The reported memory of a role, compared with arithmetic on its tensors."""

from __future__ import annotations

import pytest
import torch
from role_cases import actor, critic, samples, train_batch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt
from tandem.platform.loop.protocols import Sampling
from tandem.workers.engines.hf import HFEngine
from tandem.workers.models.footprint import Activations

BATCH = train_batch(samples(), torch.full((6, samples().tokens.shape[1]), -1.0)).as_minibatch()


def test_activations_are_the_tensors_that_the_backward_pass_reads() -> None:
    """x @ W keeps x (W is a parameter), the ReLU its result, and the square its input, which is the ReLU's result."""
    first = nn.Linear(8, 16, bias=False)
    x = torch.randn(32, 8)
    counted = Activations()
    with counted.watch(x.numel()):
        first(x).relu().square().sum()
    assert counted.bytes == 4 * (32 * 8 + 32 * 16)


def test_only_a_larger_pass_is_looked_at() -> None:
    layer, counted = nn.Linear(8, 16, bias=False), Activations()
    found = []
    for rows in (4, 2, 8):
        with counted.watch(rows * 8):
            layer(torch.randn(rows, 8)).sum()
        found.append(counted.bytes)
    assert found == [4 * 4 * 8, 4 * 4 * 8, 4 * 8 * 8]


def test_items_of_trained_roles_are_parameters_times_bytes(tiny_path: str) -> None:
    """float32 with Adam: 4 bytes of weight, 4 of gradient, 8 of moments (and a step count) for each parameter."""
    config = AutoConfig.from_pretrained(tiny_path)
    policy, body = AutoModelForCausalLM.from_config(config), AutoModel.from_config(config)
    head = config.hidden_size + 1
    for worker, model, more in ((actor(tiny_path), policy, 0), (critic(tiny_path), body, head)):
        worker.update([BATCH])
        parameters, memory = list(model.parameters()), worker.memory()
        count = sum(parameter.numel() for parameter in parameters) + more
        tensors = len(parameters) + (2 if more else 0)
        assert memory["weights"] == memory["gradients"] == 4 * count
        assert memory["optimizer"] == 8 * count + 4 * tensors
        assert memory["activations"] > 0
        assert 0 < memory["baseline"] < memory["peak"]


def test_activations_grow_with_the_micro_batch(tiny_path: str) -> None:
    """A micro-batch with all rows, padded to the longest, needs more than twice the activations of a single row."""
    small, large = actor(tiny_path, budget=16), actor(tiny_path)
    small.update([BATCH])
    large.update([BATCH])
    assert large.memory()["activations"] > 2 * small.memory()["activations"]


def test_the_cache_is_keys_and_values_of_every_token(tiny_path: str) -> None:
    """2 x layers x heads x dimensions x 4 bytes per token of a sample, except its last token, which is never fed back."""
    engine = HFEngine(tiny_path, ModelConfig(), RolloutConfig(), torch.device("cpu"))
    engine.stop_ids = set()  # all run to the limit
    config = AutoConfig.from_pretrained(tiny_path)
    prompts = [Prompt((3, 4, 5), 0, "a"), Prompt((6, 7, 8), 1, "b")]
    engine.generate(prompts, Sampling(samples=3, temperature=1.0, max_tokens=5, seed=(0,)))
    per_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4
    )
    assert engine.cache_bytes() == 6 * (3 + 4) * per_token


@pytest.mark.parametrize("device", ["cpu"])
def test_a_baseline_leaves_out_what_is_known(device: str) -> None:
    from tandem.workers.models.footprint import baseline_bytes

    assert baseline_bytes(torch.device(device), held=0) - baseline_bytes(torch.device(device), held=2**20) == pytest.approx(
        2**20, abs=2**18
    )
