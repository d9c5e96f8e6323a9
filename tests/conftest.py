"""Shared by all tests: the embedded model without a warm start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread per process: the suite runs several at once, and results must not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


HERE = Path(__file__).resolve().parent
STARTS_RAY = (
    "component/launch/test_doctor.py",
    "component/roles/test_reward_worker.py::test_scores_in_ray_actors",
    "distributed/test_rollout_group.py",
    "distributed/test_two_nodes.py",
    "distributed/test_weight_sync.py",
    "e2e/test_command.py",
    "e2e/test_learning.py",
    "e2e/test_memory.py",
    "e2e/test_resume.py::test_another_number_of_ranks_goes_on_with_the_next_prompts",
    "e2e/test_roles.py",
    "e2e/test_vllm_runs.py",
    "chaos/test_kill_loop.py",
    "chaos/test_chaos.py",
)
"""Files and tests that start Ray, in the order they run; those that measure how soon a run ends come last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that start Ray. `make test` runs them one at a time, next to the other tests: two clusters at once
    would compete for the cores, but one cluster alone leaves the cores idle for a third of the time.
    """
    places = {name: number for number, name in enumerate(STARTS_RAY)}

    def place(item: pytest.Item) -> int:
        file = item.path.relative_to(HERE).as_posix()
        return places.get(file, places.get(f"{file}::{item.name}", len(places)))

    items.sort(key=place)
    for item in items:
        if place(item) < len(places):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Folder of a small embedded model with random weights and its character tokenizer."""
    from tandem.platform.config.schema import ModelConfig, TaskConfig, TinyConfig, WarmstartConfig
    from tandem.workers.models.tiny import prepare_tiny

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CACHE", str(tmp_path_factory.mktemp("cache")))
        small = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2)
        yield str(prepare_tiny(ModelConfig(tiny=small, warmstart=WarmstartConfig(steps=0)), TaskConfig()))


@pytest.fixture
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
