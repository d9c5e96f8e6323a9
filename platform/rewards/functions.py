"""Reward functions: score one sample at a time.

A reward function takes a `Sample` and returns one number, or None for a sample that cannot be scored. A function that
scores steps instead returns a list of (end, reward) pairs: the number of response characters up to the end of the step, and
the reward of the step. The reward of the response is their sum. Set your own function with
`reward.function=path.py:name`; `REWARDS` has the built-in functions. This file does not import torch, so the processes that
run the functions start in a tenth of a second.
"""

from __future__ import annotations

import inspect
import math
import operator
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.platform.config.schema import RewardConfig
from tandem.platform.rewards import grading
from tandem.platform.system.text import nearest, shorten
from tandem.platform.system.user_code import load_attribute


@dataclass(frozen=True)
class Sample:
    """The input of a reward function: one response and its data row.

    Example: `Sample(prompt="3+4=", response="7", answer="7", response_tokens=2, truncated=False)`.
    """

    prompt: str
    response: str  # without padding; special tokens only with rollout.keep_special_tokens
    answer: Any  # from the data row
    response_tokens: int  # including the end token
    truncated: bool  # cut off at the token limit
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the data row's other fields


RewardFunction = Callable[[Sample], Any]


class RewardError(ValueError):
    """A reward function could not be loaded, raised an exception, or returned an invalid value."""


class TransientError(Exception):
    """Reward functions raise this if a retry may succeed: for an overloaded judge, or a lost connection."""


TRANSIENT = "transient"
"""The problem of an outcome for which a retry may succeed. It never appears in a score."""
TRANSIENT_ERRORS = (TransientError, ConnectionError, TimeoutError, socket.gaierror)
TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)  # HTTP status codes


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: the error or one of its causes is a `TransientError`, a refused or lost connection, a
    time-out, or the response of an overloaded server.

    Exceptions of HTTP libraries are recognised by their status code, not by their class.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        status = status or getattr(getattr(error, "response", None), "status_code", None)
        if (
            isinstance(error, TransientError | ConnectionError | TimeoutError | socket.gaierror)
            or status in TRANSIENT_STATUS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives an awaitable: a coroutine function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class Outcome:
    """The result of one function for one sample. `problem` is set if `value` is None.

    Problems that leave the sample unscored: none, nan, timeout, crash, error. `invalid` (wrong type, infinite value, steps
    out of order) is a bug in the function and always stops the run.

    Example: `Outcome(1.0)`; with two steps that end at characters 12 and 20 of the response:
    `Outcome(0.5, steps=((12, 0.5), (20, 0.0)))`.
    """

    value: float | None
    problem: str | None = None
    detail: str = ""
    steps: tuple[tuple[int, float], ...] = ()  # (end, reward) pairs; the rewards sum to `value`


def exact_match(sample: Sample) -> float:
    """1 if the response, without surrounding white space, equals the answer as text; else 0."""
    return float(sample.response.strip() == _answer(sample))


def last_number(sample: Sample) -> float:
    """1 if the last number in the response equals the answer exactly; else 0. ValueError if the answer is not a number.

    `1,234.50` is 1234.5, `3/4` is one number, a minus may be Unicode; `grading` defines equality.
    """
    gold = grading.number(_answer(sample))
    if gold is None:
        raise ValueError(f"last_number needs a number as the answer, not {shorten(_answer(sample))!r}")
    quantity = grading.last_quantity(sample.response)
    return float(quantity is not None and grading.equal_quantities(gold, quantity))


def boxed(sample: Sample) -> float:
    r"""1 if the last `\boxed{}` of the response equals the answer: as text, exact number or by exact algebra; else 0.

    Only the last box counts, even if it is cut off. Only the response is read. `grading` defines equality. Undecidable
    cases and time-outs give 0.
    """
    box = grading.last_box(sample.response)
    gold = _answer(sample)
    return float(box is not None and grading.equal(gold, box))


def matching_characters(sample: Sample) -> float | list[tuple[int, float]]:
    """One step per response character: 1/len(answer) if the answer has the same character at that position, else 0.

    Leading white space of the response is ignored. The answer itself gives 1, an empty response 0. ValueError if the answer
    is empty.
    """
    answer = _answer(sample)
    if not answer:
        raise ValueError("matching_characters needs an answer with at least one character")
    response = sample.response.lstrip()
    if not response:
        return 0.0
    before = len(sample.response) - len(response)
    right = [place < len(answer) and answer[place] == character for place, character in enumerate(response)]
    return [(before + place + 1, float(is_right) / len(answer)) for place, is_right in enumerate(right)]


REWARDS: dict[str, RewardFunction] = {
    "boxed": boxed,
    "exact_match": exact_match,
    "last_number": last_number,
    "matching_characters": matching_characters,
}
"""Built-in functions by the name used in `reward.functions`. To add a function, write it above and list it here."""


def _number_of(response: str) -> str:
    quantity = grading.last_quantity(response)
    return response.strip() if quantity is None else f"{quantity.value}{'%' if quantity.percent else ''}"


VERIFIERS: dict[str, Callable[[str], str]] = {
    "boxed": lambda response: (grading.last_box(response) or response).strip(),
    "exact_match": str.strip,
    "last_number": _number_of,
}
"""Built-in functions that decide whether a response is correct, each with a function that extracts the answer it reads."""


def verifier_of(function: str | None, functions: Mapping[str, float]) -> str | None:
    """The name of the function that measures held-out accuracy, as in the settings; None if there is none.

    Args:
        function: `eval.function`. functions: `reward.functions`.
    """
    return function if function is not None else next((name for name in functions if name in VERIFIERS), None)


def is_whole_reward(verifier: str, reward: RewardConfig) -> bool:
    """Whether the training reward consists only of the verifier's value, with weight 1."""
    others = [name for name, weight in reward.functions.items() if weight and name != verifier]
    alone = not others and reward.function is None and reward.model is None
    return alone and reward.functions.get(verifier) == 1


def part_name(spec: str) -> str:
    """The name of a function's part of a score: the function's name without the path of its file."""
    return spec.rpartition(":")[2]


def answer_of(verifier: str | None, response: str) -> str:
    """The answer of a response, as its verifier reads it. Other verifiers: the last box, or the whole response."""
    return VERIFIERS.get(verifier or "boxed", VERIFIERS["boxed"])(response)


def resolve(spec: str) -> tuple[str, RewardFunction]:
    """Name and function of a built-in (`exact_match`) or of a user's file (`path.py:name`).

    Raises:
        RewardError: the function does not exist.
    """
    if spec in REWARDS:
        return spec, REWARDS[spec]
    if ":" in spec:
        return spec.rpartition(":")[2], load_function(spec)
    near = nearest(spec, REWARDS)
    hint = f"did you mean {near}?" if near else f"built in: {', '.join(REWARDS)}; your own: path.py:name"
    raise RewardError(f"no reward function is named {spec!r}; {hint}")


def load_function(spec: str) -> RewardFunction:
    """The function that `path.py:name` names, loaded by `load_attribute`. RewardError if it does not exist."""
    function = load_attribute(spec, "reward function", RewardError)
    if not callable(function):
        location, _, name = spec.rpartition(":")
        raise RewardError(f"{name!r} in {location} is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def check_value(name: str, sample: Sample, value: Any) -> Outcome:
    """The outcome of a returned value: True is 1, None and NaN are unscorable, steps are summed.

    Raises:
        RewardError: the value is infinite, or neither a single number nor steps, or its steps are out of order or not
            finite.
    """
    if value is None:
        return Outcome(None, "none")
    where = f"reward function {name!r} returned"
    about = f"for the prompt {shorten(sample.prompt)!r}"
    if isinstance(value, list | tuple):
        try:
            return _steps_outcome(value, len(sample.response))
        except ValueError as error:
            raise RewardError(f"{where} {type(value).__name__} {shorten(repr(value))} {about}; {error}") from None
    number = _number(value)
    if number is None:
        text = f"{where} {type(value).__name__} {shorten(repr(value))} {about}; it must return one number, None or steps"
        raise RewardError(text)
    if math.isinf(number):
        raise RewardError(f"{where} an infinite number {about}; return None if the sample cannot be scored")
    return Outcome(None, "nan") if math.isnan(number) else Outcome(number)


def _steps_outcome(pairs: Sequence[Any], characters: int) -> Outcome:
    """The outcome of (end, reward) pairs for a response of `characters` characters. ValueError if they are invalid."""
    if not pairs:
        raise ValueError("there are no steps; return a number for a response without steps")
    steps: list[tuple[int, float]] = []
    for place, pair in enumerate(pairs, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"step {place} is not a pair (end in characters, reward)")
        end, reward = _whole(pair[0]), _number(pair[1])
        if end is None:
            raise ValueError(f"step {place} ends at {shorten(repr(pair[0]))}, which is not a whole number of characters")
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"the reward of step {place} is {shorten(repr(pair[1]))}, which is not a finite number")
        before = steps[-1][0] if steps else 0
        if not before < end <= characters:
            bounds = f"must end after {before} and within the {characters} characters of the response"
            raise ValueError(f"step {place} ends at {end}, but {bounds}")
        steps.append((end, reward))
    try:
        total = math.fsum(reward for _, reward in steps)
    except OverflowError:
        raise ValueError("the sum of the steps' rewards is infinite") from None
    return Outcome(total, steps=tuple(steps))


def _number(value: Any) -> float | None:
    """A single number as a float, infinite if it is too large for a float; None if it is not a number."""
    if not hasattr(value, "__float__") or tuple(getattr(value, "shape", ())) != ():
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _whole(value: Any) -> int | None:
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else None


def _answer(sample: Sample) -> str:
    if sample.answer is None:
        raise ValueError("the data row has no answer (data.answer_key names the field)")
    return str(sample.answer).strip()
