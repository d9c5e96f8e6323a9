"""The embedded task: its rows, its split, its worked examples."""

import subprocess
import sys

import pytest

from tandem.platform.config.schema import ConfigError, TaskConfig
from tandem.platform.data.task import MAX_TRAINING_ROWS
from tandem.platform.data.tasks import FORGOTTEN_CARRIES, forgetful_sum, load_task


def prompts(digits: int = 2, eval_size: int = 256, seed: int = 0) -> tuple[list[str], list[str]]:
    task = load_task(TaskConfig(digits=digits, eval_size=eval_size, seed=seed))
    return [str(row.prompt) for row in task.train], [str(row.prompt) for row in task.held_out]


def test_two_digits_are_all_pairs_once() -> None:
    train, held_out = prompts()
    assert (len(train), len(held_out)) == (8100 - 256, 256)
    assert set(train) | set(held_out) == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


@pytest.mark.parametrize("digits", [1, 2, 3, 6])
def test_answers_are_sums_and_numbers_have_their_digits(digits: int) -> None:
    task = load_task(TaskConfig(digits=digits, eval_size=16))
    for row in (*task.train[:200], *task.held_out):
        left, right = str(row.prompt).removesuffix("=").split("+")
        assert len(left) == len(right) == digits
        assert row.answer == str(int(left) + int(right))


def test_training_and_held_out_rows_are_disjoint() -> None:
    for digits in (1, 2, 4):
        train, held_out = prompts(digits, eval_size=64)
        assert not set(train) & set(held_out)
        assert len(set(held_out)) == 64


def test_worked_examples_are_training_rows() -> None:
    task = load_task(TaskConfig())
    assert [example.prompt for example in task.worked_examples] == [row.prompt for row in task.train]


@pytest.mark.parametrize(
    ("a", "b", "right", "forgetful"),
    [(37, 48, 85, 75), (12, 34, 46, 46), (95, 97, 192, 182), (90, 90, 180, 180), (999, 1, 1000, 990), (8, 7, 15, 15)],
)
def test_forgetful_sum_drops_carries_into_columns_with_digits(a: int, b: int, right: int, forgetful: int) -> None:
    assert forgetful_sum(a, b, lambda: False) == right == a + b
    assert forgetful_sum(a, b, lambda: True) == forgetful


def test_worked_examples_forget_their_share_of_carries_and_nothing_else() -> None:
    task = load_task(TaskConfig())
    off = {True: [0, 0], False: [0, 0]}  # by whether the units carry: [right, ten too low]
    for row, example in zip(task.train, task.worked_examples, strict=True):
        prompt, missing = str(row.prompt), int(row.answer) - int(example.completion)
        off[int(prompt[1]) + int(prompt[4]) > 9][{0: 0, 10: 1}[missing]] += 1
    assert off[False][1] == 0
    # 45% of 7844 sums carry: 3530, whose share forgotten has a standard deviation of 0.7%
    assert off[True][1] / sum(off[True]) == pytest.approx(FORGOTTEN_CARRIES, abs=0.03)


def test_long_numbers_are_sampled() -> None:
    train, held_out = prompts(digits=6)  # 8.1e11 pairs
    assert (len(train), len(held_out)) == (MAX_TRAINING_ROWS, 256)


def test_split_follows_the_seed_in_every_process() -> None:
    code = (
        "from tandem.platform.config.schema import TaskConfig; from tandem.platform.data.tasks import load_task;"
        "print([row.prompt for row in load_task(TaskConfig(seed=5)).held_out])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(prompts(seed=5)[1])
    assert prompts(seed=5)[1] != prompts(seed=6)[1]


def test_characters_cover_everything_written() -> None:
    task = load_task(TaskConfig())
    written = {character for row in task.train for character in f"{row.prompt}{row.answer}"}
    assert written == set(task.characters)
    assert len(task.characters) == 12


def test_holding_out_everything_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"task.eval_size=256 .* has 100 prompts; set task.eval_size below 100"):
        load_task(TaskConfig(digits=1))
