"""Small models of every causal model type of transformers, with every dropout and noise rate above 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LARGEST = 3_000_000  # parameters of a model that counts as small
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "multi_query_group_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NOT_GIVEN = ("model_type", "transformers_version", "architectures", "layer_types", "dtype")
"""What a config works out for itself."""


def small_models(rate: float) -> Iterator[tuple[str, Any, Any]]:
    """Yields (model type, small config with raised rates, model in training mode) for all types that can be built."""
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = small_config_of(kind, rate)
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(config)
            if sum(parameter.numel() for parameter in skeleton.parameters()) > LARGEST:
                continue
            model = initialised(AutoModelForCausalLM.from_config(config))
            tokens = torch.randint(3, 60, (2, 24))
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        except Exception:  # needs another shape, another input, or a library
            continue
        yield kind, config, model


def small_config_of(kind: str, rate: float) -> Any:
    """The type's default config, made small."""
    config = _shrunk(CONFIG_MAPPING[kind](), rate)
    if hasattr(config, "qk_rope_head_dim") and hasattr(config, "head_dim"):
        config.head_dim = config.qk_rope_head_dim
    values = {
        name: value
        for name, value in config.to_dict().items()
        if not isinstance(value, dict) and name not in NOT_GIVEN  # `_shrunk` makes the sub-configs small
    }
    try:
        again = CONFIG_MAPPING[kind](**values)
    except Exception:
        return config
    again = _shrunk(again, rate)
    if hasattr(again, "qk_rope_head_dim") and hasattr(again, "head_dim"):
        again.head_dim = again.qk_rope_head_dim
    return again


def initialised(model: Any) -> Any:
    """The model with weights large enough that a dropped value changes the output."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.is_floating_point and parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model.train()


def _shrunk(config: Any, rate: float) -> Any:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            _shrunk(value, rate)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            _try(config, name, SIZES[name])
        elif ("drop" in name or "jitter" in name) and isinstance(value, int | float) and not isinstance(value, bool):
            _try(config, name, rate)
        elif name == "is_decoder":  # a bidirectional model becomes causal
            _try(config, name, True)
        elif name == "pad_token_id" and value is None:
            _try(config, name, SIZES[name])
    return config


def _try(config: Any, name: str, value: float) -> None:
    """Sets a value of a config, unless the config refuses the value."""
    try:
        setattr(config, name, value)
    except Exception:
        return
