"""The files of a model other than its weights: config, generation defaults, tokenizer, templates, code.

A run copies these files unchanged. Loading and saving them again would change some and fail for others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.platform.config.schema import ConfigError, ModelConfig
from tandem.workers.models.loading import LOAD_ERRORS, cannot_load, shapes, skeleton
from tandem.workers.models.tokenizer import load_tokenizer

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".ot", ".npz", ".gguf", ".tflite")
"""Suffixes of files that hold weights or optimizer state."""
INDEX = ".index.json"  # maps tensors to weight files
LEFT_OUT = (".", "__pycache__", "checkpoint-", "step-")  # prefixes of skipped folders
LARGEST_FILE = 256 << 20  # bytes; the largest vocabularies are a tenth of that


def save_description(path: str, folder: Path) -> None:
    """Copies all files except weights of the model at `path`, a folder or hub name, unchanged.

    Raises:
        ConfigError: there is no model at `path`.
    """
    root = _folder(path)
    for file in _description(root):
        target = folder / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def check_description(path: str, config: ModelConfig, folder: Path) -> None:
    """Checks, in an empty `folder`, that the copied files alone define the model, as checkpoints and export require.

    Raises:
        ConfigError: the files are incomplete; says what they lack.
    """
    save_description(path, folder)
    try:
        model = skeleton(str(folder), config)
        load_tokenizer(str(folder), trust_remote_code=config.trust_remote_code)
    except LOAD_ERRORS as error:
        raise ConfigError(
            f"the model at {path} cannot be exported: the model cannot be rebuilt from its files besides weights: {error}. "
            "Put all of its config, tokenizer and code files into one folder, and set model.path to it"
        ) from error
    original = skeleton(path, config)
    try:
        original.get_input_embeddings()
    except NotImplementedError:
        raise ConfigError(
            f"the model at {path} does not say where its embedding is: its class {type(original).__name__} needs "
            "get_input_embeddings, as `transformers` asks of every language model"
        ) from None
    if type(model).__name__ != type(original).__name__ or shapes(model.state_dict()) != shapes(original.state_dict()):
        raise ConfigError(
            f"the model at {path} cannot be exported: its files besides weights define a different model, "
            f"{type(model).__name__} instead of {type(original).__name__}"
        )


def generation_config(path: str) -> Any:
    """The generation config of the model at `path`; None if there is none.

    Raises:
        ConfigError: the file is invalid.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
    except LOAD_ERRORS as error:
        raise cannot_load(f"the generation_config.json of {path}", path, error) from error


def end_token_ids(path: str, tokenizer: Any) -> set[int]:
    """The token ids that end a response: those of the generation config (or else of the model's config) and the tokenizer.

    The config's id counts only if it is in the file. Some model types have a default, which may be an arbitrary token of
    this vocabulary.
    """
    defaults = getattr(generation_config(path), "eos_token_id", None)
    ends = _ids(defaults) or _ids(_in_config_file(path))
    return ends | _ids(tokenizer.eos_token_id)


def embedding_rows(path: str, config: ModelConfig, *, body: bool = False) -> int:
    """The number of embedding rows, and so of readable token ids, of the causal language model at `path` or its `body`."""
    return _rows(path, config.trust_remote_code, body)[0]


def output_rows(path: str, config: ModelConfig) -> int:
    """The number of output rows, and so of token ids that can be sampled, of the causal language model at `path`."""
    return _rows(path, config.trust_remote_code, False)[1]


@lru_cache(maxsize=8)
def _rows(path: str, trust_remote_code: bool, body: bool) -> tuple[int, int]:
    model = skeleton(path, ModelConfig(trust_remote_code=trust_remote_code), body=body)
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    return int(first.weight.shape[0]), int((first if last is None else last).weight.shape[0])


def _in_config_file(path: str) -> Any:
    from transformers import PreTrainedConfig

    try:
        written, _ = PreTrainedConfig.get_config_dict(path)
    except LOAD_ERRORS as error:
        raise cannot_load(f"the config of {path}", path, error) from error
    text = written.get("text_config")
    end = written.get("eos_token_id")
    return text.get("eos_token_id") if end is None and isinstance(text, dict) else end


def _ids(value: Any) -> set[int]:
    """An id, a list of ids or None as a set."""
    return {int(token) for token in (value if isinstance(value, list | tuple) else [value]) if token is not None}


def _folder(path: str) -> Path:
    """The local folder of a model's files; for a hub name, its folder in transformers' cache."""
    from transformers.utils import cached_file

    try:
        config = cached_file(path, "config.json")
    except LOAD_ERRORS as error:
        raise cannot_load(f"the model at {path}", path, error) from error
    assert config is not None, "cached_file raises where there is no such file"
    return Path(config).parent


def _description(root: Path) -> Iterator[Path]:
    """The files that are not weights. Skips checkpoint folders, hidden folders and caches."""
    entered = set[str]()
    for folder, folders, files in os.walk(root, followlinks=True):
        is_new = os.path.realpath(folder) not in entered  # a link may lead back up
        entered.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if is_new and not name.startswith(LEFT_OUT))
        for file in (Path(folder, name) for name in sorted(files) if is_new and not name.startswith(".")):
            if file.is_file() and not file.name.endswith((*WEIGHTS, INDEX)) and file.stat().st_size <= LARGEST_FILE:
                yield file
