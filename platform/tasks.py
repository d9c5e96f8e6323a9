"""Embedded tasks: procedural, verifiable, and split into training and held-out rows.

To add a task, write a function from `TaskConfig` to `Task` and enter it in `TASKS`; its name also goes into the choices
of `task.name`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.platform.config import ConfigError, TaskConfig
from tandem.platform.data import Row

MAX_TRAINING_ROWS = 100_000  # larger tasks are sampled, never enumerated


@dataclass(frozen=True)
class WorkedExample:
    """What supervised fine-tuning learns from.

    Example: `WorkedExample(prompt="37+48=", completion="85")`; the end token is the tokenizer's business.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class Task:
    """A task in full: no held-out row is among the training rows or the worked examples."""

    name: str
    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    worked_examples: tuple[WorkedExample, ...]
    characters: str  # every character that prompts and answers are written in


def load_task(config: TaskConfig) -> Task:
    """The task that the settings name, the same for the same settings in every process.

    Raises ConfigError if the task is too small to hold out `task.eval_size` prompts.
    """
    return TASKS[config.name](config)


def addition(config: TaskConfig) -> Task:
    """Sums of two numbers of `task.digits` digits each: "37+48=" is answered "85"."""
    low = 10 ** (config.digits - 1) if config.digits > 1 else 0
    span = 10**config.digits - low
    training, held_out = _split(span * span, config)

    def row(number: int) -> Row:
        a, b = low + number // span, low + number % span
        return Row(prompt=f"{a}+{b}=", answer=str(a + b))

    train = tuple(row(number) for number in training)
    return Task(
        name="addition",
        train=train,
        held_out=tuple(row(number) for number in held_out),
        worked_examples=tuple(WorkedExample(str(item.prompt), item.answer) for item in train),
        characters="0123456789+=",
    )


def _split(size: int, config: TaskConfig) -> tuple[list[int], list[int]]:
    """Disjoint (training, held-out) row numbers out of `size`, both in an order drawn from `task.seed`."""
    if config.eval_size >= size:
        raise ConfigError(
            f"task.eval_size={config.eval_size} held-out prompts leave none to train on: {config.name} with "
            f"task.digits={config.digits} has {size} prompts; set task.eval_size below {size} or raise task.digits"
        )
    wanted = min(size, config.eval_size + MAX_TRAINING_ROWS)
    numbers = random.Random(config.seed).sample(range(size), wanted)
    return numbers[config.eval_size :], numbers[: config.eval_size]


TASKS: Mapping[str, Callable[[TaskConfig], Task]] = {"addition": addition}
