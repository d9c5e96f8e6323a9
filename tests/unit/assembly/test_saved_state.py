"""The loop state in a checkpoint: restored, or refused with the names of file and field."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from fake_roles import make

from tandem.launch.assembly.resume import restore
from tandem.platform.config.schema import ConfigError

FACTS = [{"updates": 1, "random": {}}]


def take_up(changes: dict[str, Any], facts: Any = FACTS) -> int:
    """Restores a state with these changes; returns the step after which the loop continues."""

    def load_state(parts: Any, facts: Any) -> None:
        if not facts[0]["random"].get("torch", True):
            raise TypeError("no state of a generator")

    driver = make(steps=1).driver
    state = {**driver.state(), "step": 1, **changes}
    given: Any = SimpleNamespace(path="c", driver=lambda: state, facts=lambda role: facts, parts=lambda role: iter([]))
    roles: Any = SimpleNamespace(trained=lambda: {"actor": SimpleNamespace(load_state=load_state)})
    restore(given, driver, roles)
    return driver.number


def test_what_a_driver_keeps_is_taken_up() -> None:
    assert take_up({}) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "1"}, r"driver\.json: field 'step' is text"),
        ({"version": None}, r"driver\.json: field 'version' is nothing"),
        ({"critic_ready": 1}, r"driver\.json: field 'critic_ready' is a number"),
        ({"kl_coef": math.nan}, r"driver\.json: field 'kl_coef' is nan"),
        ({"leftover": {}}, r"driver\.json: field 'leftover' is an object"),
        ({"leftover": [{"group_id": 1}]}, r"driver\.json does not hold what tandem writes: KeyError"),
        ({"reward_moments": []}, r"driver\.json does not hold what tandem writes: IndexError"),
        ({"data": "other"}, "was written with .* training prompts"),
    ],
)
def test_a_loop_of_another_shape_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^c.*{said}"):
        take_up(changes)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([], "expected at least one rank"),
        ([{"updates": -1, "random": {}}], "with 0 updates or more"),
        ([{"updates": "1", "random": {}}], r"field '0\.updates' is text"),
        ([{"updates": 1}], "field '0' lacks the field 'random'"),
        ([{"updates": 1, "random": {"torch": 0}}], "does not hold what tandem writes: TypeError: no state"),
    ],
)
def test_ranks_of_another_shape_are_told(facts: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^c/actor.*{said}"):
        take_up({}, facts)
