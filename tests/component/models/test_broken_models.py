"""Model folders with invalid files: every reader reports the problem and names the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tandem.launch.assembly.inputs import check_context
from tandem.platform.config.schema import Config, ConfigError, ModelConfig
from tandem.workers.models.description import end_token_ids
from tandem.workers.models.loading import load_policy
from tandem.workers.models.tokenizer import load_tokenizer

NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
CONTENTS = {
    "deep": "[" * 100_000,
    "number": "3",
    "list": "[3]",
    "null": "null",
    "empty": "",
    "half": '{"a":',
    "no UTF-8": "\udcff",
}


def read(path: str) -> None:
    check_context(Config(), path)
    end_token_ids(path, load_tokenizer(path))
    load_policy(path, ModelConfig())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_holds_something_else(tiny_path: str, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    read(str(folder))
    for what, content in CONTENTS.items():
        (folder / name).write_text(content, encoding="utf-8", errors="surrogateescape")
        if name == "generation_config.json" and what in ("empty", "half", "no UTF-8"):
            read(str(folder))  # transformers ignores this file if it is not JSON
            continue
        with pytest.raises(ConfigError, match=f"{folder} cannot be loaded"):
            read(str(folder))
