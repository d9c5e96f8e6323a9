"""Embedded tasks: procedural, verifiable, and split into training and held-out rows.

To add a task, write a function from `TaskConfig` to `Task`, add it to `TASKS`, and add `conf/task/<name>.yaml`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.platform.config.schema import ConfigError, TaskConfig
from tandem.platform.data.rows import Row
from tandem.platform.data.task import Task, WorkedExample, count, pair, split
from tandem.platform.data.worked_tasks import chained_addition, worked_addition

# Share of carries that the worked examples forget. It is above one half: a model that imitates them drops carries when it
# decodes greedily, but keeps some when it samples. Reinforcement learning can find and reinforce these.
FORGOTTEN_CARRIES = 0.7
MOST_OF_A_LENGTH = 25_000  # training rows of each length of mixed_addition
HELD_OUT_SHARE = 4  # mixed_addition holds out at most one of so many sums of a length


def load_task(config: TaskConfig) -> Task:
    """The task that the settings select. Equal settings give equal tasks in every process.

    Raises:
        ConfigError: the task is too small to hold out `task.eval_size` prompts.
    """
    return TASKS[config.name].make(config)


def addition(config: TaskConfig) -> Task:
    """Sums of two numbers with `task.digits` digits each: the answer to "37+48=" is "85".

    The worked examples often forget the carry ("75"). Imitation alone therefore stays well below the best reward, which
    leaves room for reinforcement learning.
    """
    training, held_out = split(count(config.digits) ** 2, config)
    return _sums(config, [pair(config.digits, n) for n in training], [pair(config.digits, n) for n in held_out])


def mixed_addition(config: TaskConfig) -> Task:
    """Sums as in `addition`, of numbers with one to `task.digits` digits: the prompt alone tells how hard its sum is.

    Every length is equally frequent in training, where one-digit sums repeat, and as far as there are enough, held out.
    """
    drawn = random.Random(config.seed)
    training: list[tuple[int, int]] = []
    held_out: list[tuple[int, int]] = []
    longest = min(MOST_OF_A_LENGTH, count(config.digits) ** 2)
    for digits in range(1, config.digits + 1):
        size = count(digits) ** 2
        left, lengths = (
            config.eval_size - len(held_out),
            config.digits - digits + 1,
        )  # longer sums fill what short ones lack
        kept = min(-(-left // lengths), size // HELD_OUT_SHARE)
        numbers = drawn.sample(range(size), min(size, kept + MOST_OF_A_LENGTH))
        held_out += [pair(digits, n) for n in numbers[:kept]]
        rest = [pair(digits, n) for n in numbers[kept:]]
        training += [rest[n % len(rest)] for n in range(longest)]
    if len(held_out) < config.eval_size:
        raise ConfigError(
            f"task.eval_size={config.eval_size}: mixed_addition with task.digits={config.digits} can hold out "
            f"{len(held_out)} prompts; set task.eval_size={len(held_out)} or raise task.digits"
        )
    drawn.shuffle(training)
    return _sums(config, training, held_out)


def _sums(config: TaskConfig, training: Sequence[tuple[int, int]], held_out: Sequence[tuple[int, int]]) -> Task:
    """The task of these sums, with worked examples that forget carries."""
    pupil = random.Random(config.seed)

    def row(a: int, b: int) -> Row:
        return Row(prompt=f"{a}+{b}=", answer=str(a + b))

    def example(a: int, b: int) -> WorkedExample:
        return WorkedExample(f"{a}+{b}=", str(forgetful_sum(a, b, lambda: pupil.random() < FORGOTTEN_CARRIES)))

    return Task(
        name=config.name,
        train=tuple(row(*numbers) for numbers in training),
        held_out=tuple(row(*numbers) for numbers in held_out),
        worked_examples=tuple(example(*numbers) for numbers in training),
        characters="0123456789+=",
    )


def forgetful_sum(a: int, b: int, forgets: Callable[[], bool]) -> int:
    """Adds a + b column by column. Calls `forgets` at each carry into a column that has digits.

    Example: 37 + 48 is 85, or 75 when the carry of 7 + 8 is forgotten.
    """
    total, place, carry = 0, 1, 0
    while place <= max(a, b):
        column = a // place % 10 + b // place % 10 + carry
        total += column % 10 * place
        place *= 10
        carry = column // 10
        if carry and place <= max(a, b) and forgets():
            carry = 0
    return total + carry * place


@dataclass(frozen=True)
class EmbeddedTask:
    """How a task is made, and what it needs."""

    make: Callable[[TaskConfig], Task]
    reward: str  # the function that reads its responses
    response_tokens: Callable[[TaskConfig], int]  # of the longest response
    sized_by: str = "digits"  # the field of `task` that decides its size


SPARE = 6  # tokens beyond those of an answer, so that a model that rambles is cut off a little later

TASKS: Mapping[str, EmbeddedTask] = {
    "addition": EmbeddedTask(addition, "exact_match", lambda task: task.digits + SPARE),
    "mixed_addition": EmbeddedTask(mixed_addition, "exact_match", lambda task: task.digits + SPARE),
    "worked_addition": EmbeddedTask(worked_addition, "last_number", lambda task: 10 * task.digits + SPARE),
    "chained_addition": EmbeddedTask(chained_addition, "last_number", lambda task: 6 * task.steps + SPARE, "steps"),
}
