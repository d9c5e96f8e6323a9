"""Writes the trained policy as a Hugging Face folder: `python launch/export.py checkpoint=FOLDER to=FOLDER`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.launch.compose.command import as_called, command
from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import write_json
from tandem.platform.system.readers import read_object
from tandem.platform.system.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

USAGE = """usage: python launch/export.py checkpoint=PATH to=FOLDER [dtype=float32|bfloat16] [trust_remote_code=true]

Writes the policy of a checkpoint as a folder that `from_pretrained` and vLLM load: weights, configuration, tokenizer, chat
template. Then loads the folder again and compares the weights.

  checkpoint=PATH   outputs/<run.name>/checkpoints/step-000160, or a folder of checkpoints for its newest complete one
  dtype             of the weights; default: the dtype of the run"""

ASKED = {"checkpoint": None, "to": None, "dtype": "", "trust_remote_code": "false"}


@command("cannot export", USAGE)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 written, 2 not)."""
    if not arguments:
        say(as_called(USAGE))
        return 2
    asked = parse(arguments)
    to = Path(asked["to"])
    step = export(asked["checkpoint"], to, asked["dtype"] or None, asked["trust_remote_code"].lower() == "true")
    say(f"the policy after step {step} is in {to}")
    return 0


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """The arguments by name.

    Raises:
        ConfigError: an argument is unknown, or a required argument is missing.
    """
    values = dict(argument.partition("=")[::2] for argument in arguments)
    for name in values.keys() - ASKED.keys():
        raise ConfigError(f"{name}: no such argument; expected {', '.join(ASKED)}")
    for name, default in ASKED.items():
        if default is None and not values.get(name):
            raise ConfigError(f"{name}=... is missing")
    return {name: values.get(name, default or "") for name, default in ASKED.items()}


def export(path: str, to: Path, dtype: str | None = None, trust_remote_code: bool = False) -> int:
    """Writes the policy of the checkpoint at `path` into the folder `to`; returns its training step.

    Raises:
        ConfigError: no complete checkpoint at `path`, an unknown dtype, or `to` is not empty. CheckpointError: the weights
            read back differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from tandem.launch.storage.checkpoint import CheckpointError
    from tandem.launch.storage.checkpoints import open_newest
    from tandem.platform.system.text import shorten
    from tandem.workers.models.loading import DTYPES, LOAD_ERRORS, saved_tensors
    from tandem.workers.training.state import FIXED, WEIGHTS

    checkpoint = open_newest(path)
    dtype = dtype or str(checkpoint.settings.get("model.dtype"))
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype}: expected {' or '.join(DTYPES)}")
    _check_target(to)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.copy_model(Path(folder))
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_config(config, **options)
        except LOAD_ERRORS as error:
            advice = "" if trust_remote_code else ". If the model has custom code, set trust_remote_code=true"
            raise ConfigError(
                f"the model in {checkpoint.path} cannot be created: {shorten(str(error), 300)}{advice}"
            ) from error
        missing = saved_tensors(model)
        for part in checkpoint.parts("actor"):
            for key, tensor in part.items():
                kind, _, name = key.partition("/")
                if kind not in (WEIGHTS, FIXED):
                    continue
                if name not in missing or missing[name].shape != tensor.shape:
                    raise CheckpointError(f"{checkpoint.path}: its model has no {name} of shape {tuple(tensor.shape)}")
                put(model, missing.pop(name), name, tensor)
        if missing:
            raise CheckpointError(f"{checkpoint.path} lacks {len(missing)} of the model's tensors, {min(missing)} first")
        _write(model, Path(folder), to, options)
    return checkpoint.step


def _check_target(to: Path) -> None:
    try:
        if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(f"to={to} is not empty, or not a folder. Give another")
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"to={to}: cannot be written ({error.strerror})") from error


def _write(model: Any, description: Path, to: Path, options: Mapping[str, Any]) -> None:
    """Writes the model with the files in the folder `description`, either completely or not at all."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from tandem.launch.storage.checkpoint import CheckpointError
    from tandem.launch.storage.sharing import follow_umask
    from tandem.workers.models.loading import saved_tensors

    place = to.resolve()  # keeps a link to an empty folder
    draft = place.with_name(f".{place.name}.{os.getpid()}.part")
    model.generation_config = GenerationConfig()  # transformers may refuse to write the model's own
    try:
        model.save_pretrained(draft)
        (draft / "generation_config.json").unlink(missing_ok=True)
        shutil.copytree(description, draft, dirs_exist_ok=True)  # unchanged; several chat templates are a folder
        write_config(description / "config.json", draft / "config.json", model)
        again = saved_tensors(AutoModelForCausalLM.from_pretrained(draft, **options))
        written = saved_tensors(model).items()
        different = [name for name, tensor in written if not tensor.to(again[name].dtype).equal(again[name])]
        if different:
            raise CheckpointError(f"{to} does not load as written: {len(different)} tensors differ, {different[0]} first")
        follow_umask(draft)  # weights and the description's folder are created with permissions for the user only
        draft.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put(model: Any, own: Tensor, name: str, tensor: Tensor) -> None:
    """Sets the value of a parameter or buffer of the model; a buffer also takes the dtype of `tensor`."""
    from torch.nn import Parameter

    from tandem.workers.models.loading import set_buffer

    if isinstance(own, Parameter):
        own.data.copy_(tensor)
    else:
        set_buffer(model, name, tensor)


def write_config(before: Path, after: Path, model: Any) -> None:
    """Writes the config of the base model with the dtype and the class of `model`."""
    config, dtype = read_object(before, dict[str, Any]), str(model.dtype).removeprefix("torch.")
    for part in config.values():
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = dtype
    config.pop("torch_dtype", None)  # the older name of dtype
    config |= {"dtype": dtype, "architectures": [type(model).__name__]}
    write_json(after, config)


if __name__ == "__main__":
    sys.exit(main())
