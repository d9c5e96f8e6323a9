"""The parts of an embedded task."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem.platform.config.schema import ConfigError, TaskConfig
from tandem.platform.data.rows import Row

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
    characters: str  # all characters that occur in prompts, answers and worked examples


def split(size: int, config: TaskConfig, sized_by: str = "digits") -> tuple[list[int], list[int]]:
    """Disjoint (training, held-out) row numbers below `size`, both in a random order given by `task.seed`.

    `sized_by` is the field of `task` that decides the size.

    Raises:
        ConfigError: nothing would be left for training.
    """
    if config.eval_size >= size:
        raise ConfigError(
            f"task.eval_size={config.eval_size} held-out prompts leave no training prompts: {config.name} with "
            f"task.{sized_by}={getattr(config, sized_by)} has {size} prompts; set task.eval_size below {size} or raise "
            f"task.{sized_by}"
        )
    wanted = min(size, config.eval_size + MAX_TRAINING_ROWS)
    numbers = random.Random(config.seed).sample(range(size), wanted)
    return numbers[config.eval_size :], numbers[: config.eval_size]


def count(digits: int) -> int:
    """How many numbers have so many digits; a single digit may be 0."""
    return 9 * int(10 ** (digits - 1)) if digits > 1 else 10


def pair(digits: int, number: int) -> tuple[int, int]:
    """The pair of numbers with so many digits each, by its number below `count(digits) ** 2`."""
    low = 10 ** (digits - 1) if digits > 1 else 0
    return low + number // count(digits), low + number % count(digits)
