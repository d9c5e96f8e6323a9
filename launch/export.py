"""Write the trained policy as a Hugging Face folder: `python launch/export.py checkpoint=FOLDER to=FOLDER`."""

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
template. It is loaded once more and compared.

  checkpoint=PATH   outputs/<run.name>/checkpoints/step-000160, or a folder of checkpoints: then the newest whole one
  dtype             of the weights; default: that of the run"""

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
        ConfigError: one is unknown, or one that is needed is missing.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    for name in given.keys() - ASKED.keys():
        raise ConfigError(f"{name}: no such argument; there are {', '.join(ASKED)}")
    for name, default in ASKED.items():
        if default is None and not given.get(name):
            raise ConfigError(f"{name}=... is missing")
    return {name: given.get(name, default or "") for name, default in ASKED.items()}


def export(path: str, to: Path, dtype: str | None = None, trust_remote_code: bool = False) -> int:
    """Writes the policy of the checkpoint at `path` into the folder `to`; returns its training step.

    Raises:
        ConfigError: no whole checkpoint there, an unknown dtype, or `to` holds something. CheckpointError: what is read
        back differs.
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
            advice = "" if trust_remote_code else ". If the model has code of its own, set trust_remote_code=true"
            raise ConfigError(
                f"the model in {checkpoint.path} cannot be made: {shorten(str(error), 300)}{advice}"
            ) from error
        own = saved_tensors(model)
        for part in checkpoint.parts("actor"):
            for key, tensor in part.items():
                kind, _, name = key.partition("/")
                if kind not in (WEIGHTS, FIXED):
                    continue
                if name not in own or own[name].shape != tensor.shape:
                    raise CheckpointError(f"{checkpoint.path}: its model has no {name} of shape {tuple(tensor.shape)}")
                put(model, own.pop(name), name, tensor)
        if own:
            raise CheckpointError(f"{checkpoint.path} lacks {len(own)} of the model's tensors, {min(own)} first")
        _write(model, Path(folder), to, options)
    return checkpoint.step


def _check_target(to: Path) -> None:
    try:
        if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(f"to={to} is not empty, or no folder. Give another")
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"to={to}: cannot be written ({error.strerror})") from error


def _write(model: Any, description: Path, to: Path, options: Mapping[str, Any]) -> None:
    """The model with the files of its `description`, whole or not at all."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from tandem.launch.storage.checkpoint import CheckpointError
    from tandem.launch.storage.sharing import follow_umask
    from tandem.workers.models.loading import saved_tensors

    place = to.resolve()  # a link to an empty folder stays one
    draft = place.with_name(f".{place.name}.{os.getpid()}.part")
    model.generation_config = GenerationConfig()  # the model's own may be one that transformers refuses to write
    try:
        model.save_pretrained(draft)
        (draft / "generation_config.json").unlink(missing_ok=True)
        shutil.copytree(description, draft, dirs_exist_ok=True)  # as they were; several chat templates are a folder
        write_config(description / "config.json", draft / "config.json", model)
        again = saved_tensors(AutoModelForCausalLM.from_pretrained(draft, **options))
        written = saved_tensors(model).items()
        different = [name for name, tensor in written if not tensor.to(again[name].dtype).equal(again[name])]
        if different:
            raise CheckpointError(
                f"{to} would not load as it was written: {len(different)} tensors differ, {different[0]} first"
            )
        follow_umask(draft)  # weights are written, and the description's folder made, for the user alone
        draft.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put(model: Any, own: Tensor, name: str, tensor: Tensor) -> None:
    """Gives a parameter or buffer of the model its value; a buffer takes the dtype too, whatever that of the weights."""
    from torch.nn import Parameter

    from tandem.workers.models.loading import set_buffer

    if isinstance(own, Parameter):
        own.data.copy_(tensor)
    else:
        set_buffer(model, name, tensor)


def write_config(before: Path, after: Path, model: Any) -> None:
    """The config of the base model, but for the dtype of the weights and the class that they are of."""
    config, dtype = read_object(before, dict[str, Any]), str(model.dtype).removeprefix("torch.")
    for part in config.values():
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = dtype
    config.pop("torch_dtype", None)  # an older name of it
    config |= {"dtype": dtype, "architectures": [type(model).__name__]}
    write_json(after, config)


if __name__ == "__main__":
    sys.exit(main())
