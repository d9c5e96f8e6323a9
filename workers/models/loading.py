"""Loads models, and runs the roles' forward passes on the token axis of `platform/experience/batch.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tandem.platform.algorithms.logprobs import token_logprobs
from tandem.platform.config.schema import ConfigError, ModelConfig
from tandem.platform.experience.batch import RolloutBatch, real_tokens
from tandem.platform.system.text import shorten
from tandem.workers.models.determinism import disable_dropout, without_rates
from tandem.workers.models.value import ValueModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOAD_ERRORS = (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, ImportError, SafetensorError)
"""Errors that transformers raises for a folder or hub name that is missing, incomplete or damaged, or has unexpected
content.
"""


def load_policy(path: str, config: ModelConfig) -> Any:
    """The causal language model at `path`, without dropout."""
    from transformers import AutoModelForCausalLM

    return prepared(_load(AutoModelForCausalLM, path, config), config)


def load_critic(path: str, config: ModelConfig, head: str = "zero") -> ValueModel:
    """A value model on the body of the model at `path`; its head is zero, or copied from that reward model's score head.

    Raises:
        ConfigError: the model cannot be loaded, or lacks the score head that `head` asks for.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    if head == "zero":
        return ValueModel(prepared(_load(AutoModel, path, config), config))
    check_score_head(path, config)
    model, info = _load(AutoModelForSequenceClassification, path, config, output_loading_info=True)
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear):
        raise _no_score_head(path, "its head is no linear layer called score")
    if missing := sorted(info["missing_keys"]):
        raise _no_score_head(path, f"its checkpoint lacks {', '.join(missing[:3])}")
    value_model = ValueModel(prepared(model.base_model, config))
    value_model.start_from(score)
    return value_model


def check_score_head(path: str, config: ModelConfig) -> None:
    """Refuses a model whose config does not have exactly one label; reads no weights.

    Raises:
        ConfigError: the config cannot be read, or is not that of a reward model.
    """
    from transformers import AutoConfig

    try:
        labels = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code).num_labels
    except LOAD_ERRORS as error:
        raise cannot_load(f"critic.path={path}", path, error) from error
    if labels != 1:
        raise _no_score_head(path, f"it has {labels} labels, a reward model has one")


def _no_score_head(path: str, why: str) -> ConfigError:
    """The error for a critic that cannot start from the score head of the model at `path`."""
    return ConfigError(
        f"critic.head=score takes the score head of a reward model, but critic.path={path} has none: {why}. "
        "Set critic.path to a sequence classifier with one score, or critic.head=zero"
    )


def _load(cls: Any, path: str, config: ModelConfig, **options: Any) -> Any:
    from transformers import AutoConfig

    trust, dtype = config.trust_remote_code, DTYPES[config.dtype]
    try:
        settings = without_rates(AutoConfig.from_pretrained(path, trust_remote_code=trust))
        settings.return_dict = True  # code reads outputs by name
        return cls.from_pretrained(path, config=settings, dtype=dtype, trust_remote_code=trust, **options)
    except LOAD_ERRORS as error:
        raise cannot_load(f"the model at {path}", path, error) from error


def skeleton(path: str, config: ModelConfig, *, body: bool = False) -> Any:
    """The causal language model at `path`, or only its body, on the meta device; reads the config but no weights."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    trust, cls = config.trust_remote_code, AutoModel if body else AutoModelForCausalLM
    with torch.device("meta"):
        return cls.from_config(AutoConfig.from_pretrained(path, trust_remote_code=trust), trust_remote_code=trust)


def untrained(path: str, config: ModelConfig, *, body: bool = False) -> Any:
    """The model of `load_policy`, or only its body as in a critic, with fresh weights instead of those at `path`."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    trust, cls = config.trust_remote_code, AutoModel if body else AutoModelForCausalLM
    settings = without_rates(AutoConfig.from_pretrained(path, trust_remote_code=trust))
    settings.return_dict = True
    return prepared(cls.from_config(settings, dtype=DTYPES[config.dtype], trust_remote_code=trust), config)


def policy_bytes(model: nn.Module, config: ModelConfig) -> int:
    """Bytes of a model's weights in the dtype of the settings; the model may be on the meta device."""
    return sum(parameter.numel() for parameter in model.parameters()) * DTYPES[config.dtype].itemsize


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in the model's saved state, by name; every process recomputes the others."""
    buffers: dict[str, Tensor] = {}
    for owner, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{owner}.{name}" if owner else name] = buffer
    return buffers


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def set_buffer(model: nn.Module, path: str, tensor: Tensor) -> None:
    """Replaces the buffer at a dotted path with a tensor."""
    owner, _, name = path.rpartition(".")
    model.get_submodule(owner)._buffers[name] = tensor


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name: everything that a copy of the model needs."""
    return {**dict(model.named_parameters()), **saved_buffers(model)}


def cannot_load(what: str, path: str, error: Exception) -> ConfigError:
    """The error for `what` not loading from a folder or hub name; a missing folder is reported as such."""
    if path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        return ConfigError(f"{what} cannot be loaded: there is no such folder")
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "  # other errors' texts say little
    return ConfigError(f"{what} cannot be loaded: {kind}{shorten(str(error), 1000)}")


def prepared(model: Any, config: ModelConfig) -> Any:
    """The model as the roles use it: without dropout, and with gradient checkpointing if the settings ask for it."""
    disable_dropout(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def token_logits(forward: Callable[..., Any], batch: RolloutBatch) -> Tensor:
    """(B, T, V) logits of a causal language model; position t predicts token t + 1."""
    logits: Tensor = forward(**model_inputs(batch.tokens, batch.lengths), use_cache=False).logits
    return logits


def batch_logprobs(forward: Callable[..., Any], batch: RolloutBatch, temperature: float) -> Tensor:
    """(B, T) float32 log-probs of the rows' tokens by a causal language model."""
    return token_logprobs(token_logits(forward, batch), batch.tokens, temperature)


def model_inputs(tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` (B, T) of right-padded rows, from their lengths; padding content is ignored."""
    real = real_tokens(lengths, tokens.shape[1])
    return {"input_ids": torch.where(real, tokens, torch.zeros_like(tokens)), "attention_mask": real.long()}
