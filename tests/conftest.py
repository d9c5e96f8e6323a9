"""What tests share: the embedded model without a warm start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread per process: the suite runs several at once, and results must not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Folder of a small embedded model with random weights and its character tokenizer."""
    from tandem.platform.config import ModelConfig, TaskConfig, TinyConfig, WarmstartConfig
    from tandem.workers.tiny import prepare_tiny

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CACHE", str(tmp_path_factory.mktemp("cache")))
        small = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2)
        yield str(prepare_tiny(ModelConfig(tiny=small, warmstart=WarmstartConfig(steps=0)), TaskConfig()))


@pytest.fixture
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
