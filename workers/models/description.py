"""What belongs to a model besides its weights: config, generation defaults, tokenizer, templates, code.

A run copies these files as they are. Loading and saving them again would change some, and refuse others.
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
"""Endings of files that hold weights or the state of an optimizer."""
INDEX = ".index.json"  # says which tensor is in which file of weights
LEFT_OUT = (".", "__pycache__", "checkpoint-", "step-")  # folders that begin so
LARGEST_FILE = 256 << 20  # bytes; the largest vocabularies are a tenth of that


def save_description(path: str, folder: Path) -> None:
    """Copies the files of the model at `path`, a folder or hub name, that are not weights, as they are.

    Raises:
        ConfigError: there is no model.
    """
    root = _folder(path)
    for file in _description(root):
        target = folder / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def check_description(path: str, config: ModelConfig, folder: Path) -> None:
    """Tries what a checkpoint and its export will need, in an empty `folder`: the copied files alone make the model.

    Raises:
        ConfigError: what they lack.
    """
    save_description(path, folder)
    try:
        model = skeleton(str(folder), config)
        load_tokenizer(str(folder), trust_remote_code=config.trust_remote_code)
    except LOAD_ERRORS as error:
        raise ConfigError(
            f"the model at {path} cannot be exported: its files besides weights do not make the model again: {error}. "
            "Put all of its config, tokenizer and code files into one folder, and set model.path to it"
        ) from error
    own = skeleton(path, config)
    try:
        own.get_input_embeddings()
    except NotImplementedError:
        raise ConfigError(
            f"the model at {path} does not say where its embedding is: its class {type(own).__name__} needs "
            "get_input_embeddings, as `transformers` asks of every language model"
        ) from None
    if type(model).__name__ != type(own).__name__ or shapes(model.state_dict()) != shapes(own.state_dict()):
        raise ConfigError(
            f"the model at {path} cannot be exported: its files besides weights make another model, "
            f"{type(model).__name__} in place of {type(own).__name__}"
        )


def generation_config(path: str) -> Any:
    """How the model at `path` says it is sampled from; None without such a file.

    Raises:
        ConfigError: it holds something else.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
    except LOAD_ERRORS as error:
        raise cannot_load(f"the generation_config.json of {path}", path, error) from error


def end_token_ids(path: str, tokenizer: Any) -> set[int]:
    """The ids that end a response: what the generation defaults, else the config of the model, and its tokenizer say.

    A config's word counts only if it is in the file: some model types have a default, which may be any token of another
    vocabulary.
    """
    defaults = getattr(generation_config(path), "eos_token_id", None)
    ends = _ids(defaults) or _ids(_in_config_file(path))
    return ends | _ids(tokenizer.eos_token_id)


def embedding_rows(path: str, config: ModelConfig, *, body: bool = False) -> int:
    """How many tokens the causal language model at `path`, or its `body` alone, can read: rows of its embedding."""
    return _rows(path, config.trust_remote_code, body)[0]


def output_rows(path: str, config: ModelConfig) -> int:
    """How many tokens the causal language model at `path` can sample: rows of its last layer."""
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
    own = written.get("eos_token_id")
    return text.get("eos_token_id") if own is None and isinstance(text, dict) else own


def _ids(value: Any) -> set[int]:
    """One id, several, or none as a set."""
    return {int(token) for token in (value if isinstance(value, list | tuple) else [value]) if token is not None}


def _folder(path: str) -> Path:
    """Where the files of a model are on this machine; those of a hub name are in transformers' cache once it is loaded."""
    from transformers.utils import cached_file

    try:
        found = cached_file(path, "config.json")
    except LOAD_ERRORS as error:
        raise cannot_load(f"the model at {path}", path, error) from error
    assert found is not None, "cached_file raises where there is no such file"
    return Path(found).parent


def _description(root: Path) -> Iterator[Path]:
    """The files that are not weights; folders of checkpoints, hidden ones and caches are left out."""
    entered = set[str]()
    for folder, folders, files in os.walk(root, followlinks=True):
        is_new = os.path.realpath(folder) not in entered  # a link may lead back up
        entered.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if is_new and not name.startswith(LEFT_OUT))
        for file in (Path(folder, name) for name in sorted(files) if is_new and not name.startswith(".")):
            if file.is_file() and not file.name.endswith((*WEIGHTS, INDEX)) and file.stat().st_size <= LARGEST_FILE:
                yield file
