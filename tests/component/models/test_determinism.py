"""A model gives equal scores in training and evaluation mode, or is refused with the names of the modules that differ."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from causal_types import initialised, small_config_of
from small_models import small_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, OPTConfig, OPTForCausalLM, Qwen2ForCausalLM

from tandem.platform.config.schema import ConfigError, ModelConfig
from tandem.workers.models import determinism
from tandem.workers.models.determinism import check_passes, disable_dropout, without_rates
from tandem.workers.models.loading import load_critic, load_policy

CPU = torch.device("cpu")


def test_a_plain_number_copied_at_construction_is_cleared(tmp_path: Path) -> None:
    """An OPT layer keeps its dropout rate as a plain number, not in a module."""
    sizes: dict[str, Any] = {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=32, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    config.dropout, config.attention_dropout, config.layerdrop = 0.1, 0.1, 0.2
    OPTForCausalLM(config).save_pretrained(tmp_path)
    for model in (load_policy(str(tmp_path), ModelConfig()), load_critic(str(tmp_path), ModelConfig()).body):
        layers = [module for module in model.modules() if hasattr(module, "dropout")]
        assert layers
        assert all(module.dropout == 0 for module in layers)
        check_passes(model, CPU, "the model")
    config.layerdrop = 0.0  # a layer skipped in only one pass has no counterpart to compare with
    with pytest.raises(ConfigError, match=r"two passes in training mode differ.*layers\.\d"):
        check_passes(OPTForCausalLM(config), CPU, "the model")


def test_rates_are_found_by_their_meaning_in_every_part() -> None:
    """Rates in sub-configs, lists and dictionaries become 0 and keep their type; other values stay."""
    part = small_config(8)
    part.attention_dropout = 0.5
    config = small_config(8)
    config.__dict__ |= {"text": part, "extra": {"attn_pdrop": 0.1, "depth": 3}, "drop_path_rates": [0.1, 0.2]}
    config.__dict__ |= {
        "router_jitter_noise": 0.01,
        "moe_token_dropout": 1,
        "drop_tokens": True,
        "classifier_dropout": None,
    }
    without_rates(config)
    assert part.attention_dropout == 0
    assert config.extra == {"attn_pdrop": 0, "depth": 3}
    assert (config.drop_path_rates, config.router_jitter_noise) == ([0.0, 0.0], 0.0)
    assert (config.moe_token_dropout, config.drop_tokens, config.classifier_dropout) == (0, True, None)
    assert type(config.moe_token_dropout) is int
    assert config.hidden_size == 16


class Wrapped(nn.Module):
    """A layer of a model, followed by a function."""

    def __init__(self, layer: nn.Module, act: Any) -> None:
        super().__init__()
        self.layer, self.act = layer, act
        self.attention_type = "full_attention"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self, self.layer(*args, **kwargs))


def hard_coded_dropout(module: nn.Module, hidden: Tensor) -> Tensor:
    return nn.functional.dropout(hidden, 0.01, module.training)


def always_noisy(module: nn.Module, hidden: Tensor) -> Tensor:
    return hidden + torch.randn_like(hidden) * 0.01


def only_in_training(module: nn.Module, hidden: Tensor) -> Tensor:
    return hidden * (1.01 if module.training else 1.0)


def numpy_noise(module: nn.Module, hidden: Tensor) -> Tensor:
    return hidden + 0.1 * torch.from_numpy(np.random.randn(*hidden.shape)).float() if module.training else hidden


def rarely_random(module: nn.Module, hidden: Tensor) -> Tensor:
    return hidden * 1.5 if module.training and float(torch.rand([])) < 0.3 else hidden


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (hard_coded_dropout, "two passes in training mode differ"),
        (always_noisy, "two passes in evaluation mode differ"),
        (only_in_training, "a pass in training mode differs from one in evaluation mode"),
        (numpy_noise, "two passes in training mode differ"),
        (rarely_random, "differ"),
    ],
)
def test_randomness_that_no_config_names_is_refused_with_its_module(act: Any, kind: str) -> None:
    model = Qwen2ForCausalLM(small_config(32, num_hidden_layers=3))
    model.model.layers[1] = Wrapped(model.model.layers[1], act)
    with pytest.raises(ConfigError, match=kind) as refused:
        check_passes(model, CPU, "the model of the actor")
    text = str(refused.value)
    assert "the model of the actor" in text
    assert "model.layers.1 (Wrapped)" in text
    assert "layers.0" not in text
    assert "layers.2" not in text


def test_a_model_that_looks_ahead_is_refused() -> None:
    """A BERT for causal language modelling attends to later tokens unless its config says that it is a decoder."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    check_passes(initialised(BertLMHeadModel(without_rates(BertConfig(**sizes, is_decoder=True)))), CPU, "the model")
    with pytest.raises(ConfigError, match=r"the model is not causal: outputs change by .* with the token that follows"):
        check_passes(initialised(BertLMHeadModel(without_rates(BertConfig(**sizes)))), CPU, "the model")


def test_a_layer_that_is_dropped_now_and_then_is_named() -> None:
    class Dropped(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.attention_type = layer, "full_attention"
            self.calls = 0

        def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
            self.calls += 1
            return hidden if self.training and self.calls % 2 else self.layer(hidden, **kwargs)

    model = Qwen2ForCausalLM(small_config(32, num_hidden_layers=2))
    model.model.layers[0] = Dropped(model.model.layers[0])
    with pytest.raises(ConfigError, match=r"model\.layers\.0"):
        check_passes(model, CPU, "the model")


def test_a_dropout_layer_of_the_code_is_turned_off() -> None:
    model = Qwen2ForCausalLM(small_config(32))
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(0.5))
    disable_dropout(model)
    check_passes(model, CPU, "the model")


def test_the_check_leaves_no_trace() -> None:
    """The check leaves random generators, mode and buffers unchanged, so it does not change a run."""
    model = Qwen2ForCausalLM(small_config(32))
    model.model.norm = Wrapped(model.model.norm, lambda module, hidden: module.count.add_(1) * 0 + hidden)
    model.model.norm.register_buffer("count", torch.zeros(1))
    model.eval()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    check_passes(model, CPU, "the model")
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert not any(module.training for module in model.modules())
    assert float(model.model.norm.count) == 0


def test_a_model_with_few_positions_is_tried_within_them() -> None:
    check_passes(AutoModelForCausalLM.from_config(without_rates(small_config_of("gpt2", 0.3))), CPU, "the model")
    assert determinism.TOKENS > 8
    check_passes(Qwen2ForCausalLM(small_config(32, max_position_embeddings=8)), CPU, "the model")
