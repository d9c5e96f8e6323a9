"""Embedded tasks: procedural, verifiable, and split into training and held-out rows.

To add a task, write a function from `TaskConfig` to `Task`, add it to `TASKS`, and add its name to the choices of
`task.name`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.platform.config.schema import ConfigError, TaskConfig
from tandem.platform.data.rows import Row

# Share of carries that the worked examples forget. It is above one half: a model that imitates them drops carries when it
# decodes greedily, but keeps some when it samples. Reinforcement learning can find and reinforce these.
FORGOTTEN_CARRIES = 0.7
MAX_TRAINING_ROWS = 100_000  # larger tasks are sampled, not enumerated


@dataclass(frozen=True)
class WorkedExample:
    """A training example for supervised fine-tuning. It may be wrong, and the reward does not use it.

    Example: `WorkedExample(prompt="37+48=", completion="85")`; the tokenizer adds the end token.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class Task:
    """A complete task. No held-out row is among the training rows or the worked examples."""

    name: str
    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    worked_examples: tuple[WorkedExample, ...]
    characters: str  # all characters that occur in prompts and answers


def load_task(config: TaskConfig) -> Task:
    """The task that the settings select. Equal settings give equal tasks in every process.

    Raises:
        ConfigError: the task is too small to hold out `task.eval_size` prompts.
    """
    return TASKS[config.name](config)


def addition(config: TaskConfig) -> Task:
    """Sums of two numbers with `task.digits` digits each: the answer to "37+48=" is "85".

    The worked examples often forget the carry ("75"). Imitation alone therefore stays well below the best reward, which
    leaves room for reinforcement learning.
    """
    low = 10 ** (config.digits - 1) if config.digits > 1 else 0
    span = 10**config.digits - low
    training, held_out = _split(span * span, config)

    def numbers(pair: int) -> tuple[int, int]:
        return low + pair // span, low + pair % span

    def row(pair: int) -> Row:
        a, b = numbers(pair)
        return Row(prompt=f"{a}+{b}=", answer=str(a + b))

    pupil = random.Random(config.seed)

    def example(pair: int) -> WorkedExample:
        a, b = numbers(pair)
        return WorkedExample(f"{a}+{b}=", str(forgetful_sum(a, b, lambda: pupil.random() < FORGOTTEN_CARRIES)))

    return Task(
        name="addition",
        train=tuple(row(pair) for pair in training),
        held_out=tuple(row(pair) for pair in held_out),
        worked_examples=tuple(example(pair) for pair in training),
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


def _split(size: int, config: TaskConfig) -> tuple[list[int], list[int]]:
    """Disjoint (training, held-out) row numbers below `size`, both in a random order given by `task.seed`."""
    if config.eval_size >= size:
        raise ConfigError(
            f"task.eval_size={config.eval_size} held-out prompts leave no training prompts: {config.name} with "
            f"task.digits={config.digits} has {size} prompts; set task.eval_size below {size} or raise task.digits"
        )
    wanted = min(size, config.eval_size + MAX_TRAINING_ROWS)
    numbers = random.Random(config.seed).sample(range(size), wanted)
    return numbers[config.eval_size :], numbers[: config.eval_size]


TASKS: Mapping[str, Callable[[TaskConfig], Task]] = {"addition": addition}
