"""Embedded tasks whose responses show their steps, so a failed step is visible before the response ends.

The worked examples come from a pupil who has not learnt some pairs of digits, and finds others hard. At a pair that is not
learnt, and mostly at a hard one, the pupil writes `?` and guesses the answer, which is then wrong. The tokens up to a step
tell a critic how likely a reward still is: less with every such pair ahead, and nothing after `?`. Reinforcement learning
teaches the hard pairs. It unlearns `?` at the others too, where a guess at the step is no worse; a failure that is left
then shows in no token. A low actor.lr keeps failures visible for longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tandem.platform.config.schema import TaskConfig
from tandem.platform.data.rows import Row
from tandem.platform.data.task import Task, WorkedExample, count, pair, split

GIVES_UP = 0.7  # how often the pupil gives up at a hard pair; above one half, so that greedy decoding gives up too
SOLVED, SOLVABLE = 0.35, 0.65  # share of the prompts that the pupil solves, and that have no pair it has not learnt
CHARACTERS = "0123456789+=,:?"
Gives = Callable[[int, int], bool]
"""(one digit, the other) -> whether the pupil gives up at this step."""


def worked_addition(config: TaskConfig) -> Task:
    """Sums of two numbers with `task.digits` digits, worked column by column from the right.

    The response to "347+285=" is "7+5=12,4+8+1=13,3+2+1=6:632". A pupil who finds 4+8 hard writes "7+5=12,4+8?:905".
    """

    def prompt(number: int) -> str:
        return "{}+{}=".format(*pair(config.digits, number))

    def answer(number: int) -> str:
        return str(sum(pair(config.digits, number)))

    def work(number: int, gives_up: Gives) -> str:
        return worked_sum(*pair(config.digits, number), config.digits, gives_up)

    return _task(config, count(config.digits) ** 2, "digits", prompt, answer, work)


def chained_addition(config: TaskConfig) -> Task:
    """Chains of `task.steps` additions modulo 10, worked one by one: the number of steps is the horizon.

    The response to "3+8+4=" is "3+8=1,1+4=5:5", with `task.steps=2`. A pupil who finds 1+4 hard writes "3+8=1,1+4?:7".
    """

    def digits(number: int) -> list[int]:
        return [int(digit) for digit in f"{number:0{config.steps + 1}}"]

    def prompt(number: int) -> str:
        return "+".join(map(str, digits(number))) + "="

    def answer(number: int) -> str:
        return str(sum(digits(number)) % 10)

    def work(number: int, gives_up: Gives) -> str:
        return worked_chain(digits(number), gives_up)

    return _task(config, 10 ** (config.steps + 1), "steps", prompt, answer, work)


def worked_sum(a: int, b: int, digits: int, gives_up: Gives) -> str:
    """The columns of a + b up to the first at which the pupil gives up. Ends in `?` then, else in all columns."""
    steps: list[str] = []
    carry = 0
    for place in range(digits):
        one, other = a // 10**place % 10, b // 10**place % 10
        column = f"{one}+{other}" + "+1" * carry
        if gives_up(one, other):
            return ",".join([*steps, column + "?"])
        total = one + other + carry
        steps.append(f"{column}={total}")
        carry = total // 10
    return ",".join(steps)


def worked_chain(digits: Sequence[int], gives_up: Gives) -> str:
    """The additions of a chain up to the first at which the pupil gives up. Ends in `?` then, else in all additions."""
    steps: list[str] = []
    total = digits[0]
    for digit in digits[1:]:
        if gives_up(total, digit):
            return ",".join([*steps, f"{total}+{digit}?"])
        steps.append(f"{total}+{digit}={(total + digit) % 10}")
        total = (total + digit) % 10
    return ",".join(steps)


def pupils_knowledge(steps: int, seed: int) -> dict[tuple[int, int], float]:
    """How likely the pupil gives up, by pair of digits: 1 for those not learnt, GIVES_UP for hard ones, else 0.

    There are so many of each that SOLVED and SOLVABLE are the same for any number of steps.
    """
    pairs = [(one, other) for one in range(10) for other in range(10)]
    random.Random(seed).shuffle(pairs)
    unknown = 1 - SOLVABLE ** (1 / steps)
    hard = (1 - SOLVED ** (1 / steps) - unknown) / GIVES_UP
    first, second = round(100 * unknown), round(100 * (unknown + hard))
    return {pair: 1.0 if n < first else GIVES_UP if n < second else 0.0 for n, pair in enumerate(pairs)}


def _task(
    config: TaskConfig,
    size: int,
    sized_by: str,
    prompt: Callable[[int], str],
    answer: Callable[[int], str],
    work: Callable[[int, Gives], str],
) -> Task:
    """The task of `size` numbered prompts, with as many steps as the field `sized_by` of `task` says."""
    training, held_out = split(size, config, sized_by)
    pupil, knowledge = random.Random(config.seed), pupils_knowledge(getattr(config, sized_by), config.seed)

    def row(number: int) -> Row:
        return Row(prompt=prompt(number), answer=answer(number))

    def example(number: int) -> WorkedExample:
        worked = work(number, lambda one, other: pupil.random() < knowledge[one, other])
        right = answer(number)
        guess = str(pupil.randrange(10 ** (len(right) - 1) if len(right) > 1 else 0, 10 ** len(right)))
        return WorkedExample(prompt(number), f"{worked}:{guess if worked.endswith('?') else right}")

    return Task(
        name=config.name,
        train=tuple(map(row, training)),
        held_out=tuple(map(row, held_out)),
        worked_examples=tuple(map(example, training)),
        characters=CHARACTERS,
    )
