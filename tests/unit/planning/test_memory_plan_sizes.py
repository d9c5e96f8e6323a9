"""The micro-batch that fits into the available memory, for invented needs and hand-worked results."""

from __future__ import annotations

import pytest

from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.planning.memory import Room, most_rows, needed, rows_of, settled_tokens, smaller_microbatch
from tandem.platform.planning.plan import RolePlan

MIB = 2**20


def config(prompt: int = 100, response: int = 156, budget: int | None = None) -> Config:
    """A configuration with 1024 samples of at most 256 tokens per step."""
    made = Config()
    made.data.prompts_per_step, made.rollout.samples_per_prompt = 128, 8
    made.data.max_prompt_tokens, made.rollout.max_response_tokens = prompt, response
    made.train.max_tokens_per_microbatch = budget
    return made


def test_roles_that_share_a_memory_add_up() -> None:
    actor = RolePlan("actor", 2, weights=10, gradients=10, optimizer=20, working=100, process=1)
    critic = RolePlan("critic", 1, weights=5, working=300, process=1)
    assert needed([actor, critic], [{"actor": 2, "critic": 1, "gone": 3}], one_process=False) == 2 * 141 + 306
    assert needed([actor, critic], [{"actor": 2}, {"critic": 1}], one_process=False) == 306  # they take turns
    assert needed([actor, critic], [{"actor": 1, "critic": 1}], one_process=True) == 45 + 300


@pytest.mark.parametrize(
    ("usable", "rows"),
    [(1000, 64), (740, 64), (739, 32), (500, 32), (419, 16), (110, 1), (109, 0)],
)
def test_the_most_rows_that_fit(usable: int, rows: int) -> None:
    """Rows need 100 + 10 each (64: 740, 32: 420, 16: 260, 1: 110); the result is the largest power of two that fits."""
    assert most_rows(lambda count: 100 + 10 * count, usable, 64) == rows


def test_what_fits_is_found_where_another_pass_becomes_the_largest() -> None:
    """The need grows by 20 more per row after the tenth, so 40 rows need 100 + 10 x 40 + 20 x 30 = 1100."""
    rows = most_rows(lambda count: 100 + 10 * count + 20 * max(0, count - 10), 1100, 64)
    assert rows == 32


def test_rows_that_stand_for_a_micro_batch() -> None:
    """16,384 tokens are 64 rows of 256 tokens, 300 tokens may be two rows, and a rank has at most its own 1024 rows."""
    assert [rows_of(config(), tokens) for tokens in (16384, 300, 1)] == [64, 2, 1]
    assert rows_of(config(), 10**9) == 1024


def test_the_default_stays_where_it_fits() -> None:
    assert settled_tokens(config(), lambda rows: 64 * MIB, Room(100 * MIB, "this machine")) == 16384
    assert settled_tokens(config(20000, 5000), lambda rows: 1, Room(2, "this machine")) == 25000


def test_less_memory_makes_it_smaller() -> None:
    """With 85 usable MiB and 2 MiB per row, 42 rows fit, rounded down to 32 rows of 256 tokens."""
    assert settled_tokens(config(), lambda rows: rows * 2 * MIB, Room(100 * MIB, "this machine")) == 32 * 256


def test_not_even_one_sequence() -> None:
    with pytest.raises(ConfigError) as caught:
        settled_tokens(config(), lambda rows: rows * 90 * MIB, Room(100 * MIB, "each GPU"))
    text = str(caught.value)
    assert "one sequence of 256 tokens, with everything else in the memory of each GPU, needs 90.0 MiB" in text
    assert "but 85.0 MiB of 100.0 MiB are usable" in text
    assert "Set model.gradient_checkpointing=true" in text
    assert "set train.max_tokens_per_microbatch=256 to try it anyway" in text


@pytest.mark.parametrize(
    ("budget", "fits", "text"),
    [
        (16384, 4100, "Set train.max_tokens_per_microbatch=4096 (was 16384)"),
        (16384, 16384, "Set train.max_tokens_per_microbatch=8192 (was 16384)"),  # the plan was wrong
        (16384, None, "Set train.max_tokens_per_microbatch=8192 (was 16384)"),
        (2**30, None, "Set train.max_tokens_per_microbatch=131072 (was 1073741824)"),  # half of all rows of a rank
        (300, 256, "Set train.max_tokens_per_microbatch=256 (was 300)"),
    ],
)
def test_advice_after_memory_has_run_out(budget: int, fits: int | None, text: str) -> None:
    assert smaller_microbatch(config(budget=budget), fits) == text


def test_advice_where_a_micro_batch_is_one_sequence() -> None:
    made = config(budget=256)
    made.model.gradient_checkpointing = True
    assert smaller_microbatch(made, 256) == (
        "Set model.dtype=bfloat16, lower data.max_prompt_tokens or rollout.max_response_tokens: "
        "train.max_tokens_per_microbatch=256 is as small as one sequence of 256 tokens allows"
    )
