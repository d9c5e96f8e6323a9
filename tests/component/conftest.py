"""Fixtures of the component tests: reward workers that end with their test, and functions that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_cases import FUNCTIONS

from tandem.platform.config.schema import RewardConfig
from tandem.workers.roles.reward import RewardWorker


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return f"{file}:act"


@pytest.fixture
def make() -> Iterator[Callable[..., RewardWorker]]:
    """Makes reward workers, and ends them after the test."""
    workers: list[RewardWorker] = []

    def build(**settings: Any) -> RewardWorker:
        workers.append(RewardWorker(RewardConfig(**settings)))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()
