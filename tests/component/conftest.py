"""What the component tests share: reward workers that end with their test, and functions that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from causal_types import EveryType, initialised, small_models
from reward_cases import FUNCTIONS
from transformers import AutoModelForCausalLM

from tandem.platform.config import RewardConfig
from tandem.workers.determinism import disable_dropout, without_rates
from tandem.workers.reward import RewardWorker


@pytest.fixture(scope="session")
def every_type() -> EveryType:
    """A small model of every causal model type that can be built small, before and after `without_rates`."""
    found: EveryType = {}
    for kind, config, model in small_models(rate=0.3):
        cleared = initialised(AutoModelForCausalLM.from_config(without_rates(config)))
        disable_dropout(cleared)
        found[kind] = model, cleared
    return found


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return f"{file}:act"


@pytest.fixture
def make() -> Iterator[Callable[..., RewardWorker]]:
    """Makes workers, and ends them with the test."""
    workers: list[RewardWorker] = []

    def build(**settings: Any) -> RewardWorker:
        workers.append(RewardWorker(RewardConfig(**settings)))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()
