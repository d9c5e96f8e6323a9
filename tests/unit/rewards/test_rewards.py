"""Built-in reward functions, loading of user functions, and the meaning of returned values."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.platform.rewards import grading
from tandem.platform.rewards.functions import (
    REWARDS,
    Outcome,
    RewardError,
    Sample,
    boxed,
    check_value,
    exact_match,
    is_async,
    last_number,
    load_function,
    matching_characters,
    resolve,
    shorten,
)


def sample(response: str, answer: Any = None, prompt: str = "q") -> Sample:
    return Sample(prompt=prompt, response=response, answer=answer, response_tokens=len(response), truncated=False)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("7", "7", 1), (" 7\n", "7", 1), ("7", 7, 1), ("7.", "7", 0), ("07", "7", 0), ("", "7", 0), ("a b", "ab", 0)],
)
def test_exact_match(response: str, answer: Any, reward: float) -> None:
    assert exact_match(sample(response, answer)) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("3 + 4 = 7", "7", 1),
        ("so 7, not 8", "7", 0),
        ("Final Answer: **73**", "73", 1),
        ("it is 1,234.", "1234", 1),
        ("it is 1,234.50", "1234.5", 1),
        ("1,234", "1,234", 1),
        ("a list: 1,2,3", "3", 1),
        ("not grouped: 1,2345", "2345", 1),
        ("\u22121", "-1", 1),
        ("-1", "\u22121", 1),
        ("5-3", "3", 1),
        ("(2)-3", "3", 1),
        ("x = -3", "-3", 1),
        ("-$5", "-5", 1),
        ("$5", "$5.00", 1),
        (".5", "0.5", 1),
        ("0.30000000000000004", "0.3", 0),
        ("0.1", 0.1, 1),
        ("3/4", "0.75", 1),
        ("3/4", "4", 0),
        ("1/0", "0", 0),
        ("2e3", "2000", 1),
        ("7.41%", "7.41\\%", 1),
        ("0.0741", "7.41%", 1),
        ("50%", "0.5", 0),
        ("50%", "50", 1),
        ("5 cm", "5", 1),
        ("", "5", 0),
        ("none", "5", 0),
        ("9" * 5000, "9", 0),
        ("1e999999999", "9", 0),
    ],
)
def test_last_number(response: str, answer: Any, reward: float) -> None:
    assert last_number(sample(response, answer)) == reward


def test_last_number_refuses_an_answer_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="needs a number as the answer, not 'Sunday'"):
        last_number(sample("7", "Sunday"))


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_row_without_an_answer_is_no_zero(name: str) -> None:
    with pytest.raises(ValueError, match="no answer"):
        REWARDS[name](sample("\\boxed{None}", None))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("First \\boxed{5}. No, \\boxed{7}", "7"),
        ("so \\boxed{840}. ... **Final** \\boxed{840}", "840"),
        ("\\fbox{42}", "42"),
        ("\\boxed 7$", "7"),
        ("\\boxed 7.", "7"),
        ("\\(\\boxed 7\\)", "7"),
        ("\\boxed {7}", "7"),
        ("\\boxed{ \\{1,2\\} }", "\\{1,2\\}"),
        ("\\boxed{a\\\\}", "a\\\\"),
        ("\\boxed{42", None),
        ("\\boxed{5} then \\boxed{42", None),
        ("\\boxed", None),
        ("\\boxedx{5}", None),
        ("", None),
        ("\\boxed{}", ""),
        ("earlier \\boxed 3$ then \\boxed{9}", "9"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{" * 20000, None),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert grading.last_box(text) == box


@pytest.mark.parametrize(
    ("response", "gold", "reward"),
    [
        ("\\boxed{\\frac{1}{2}}", "1/2", 1),
        ("\\boxed{\\frac{1}{2}}", "1/3", 0),
        ("First \\boxed{5}. No, \\boxed{7}", "5", 0),
        ("so \\boxed{840}. ... **Final** \\boxed{840}", "840", 1),
        ("\\boxed{004}", "4", 1),
        ("\\boxed{42", "42", 0),
        ("", "5", 0),
        ("\\boxed{}", "5", 0),
        ("\\boxed{}", "", 0),
        ("the answer is 4", "4", 0),
        ("\\boxed{1} or \\boxed{2} or \\boxed{3}", "2", 0),
        ("\\boxed{1} or \\boxed{2} or \\boxed{3}", "3", 1),
        ("\\boxed{1,2,3,4}", "2", 0),
        ("\\boxed{x}", "2", 0),
        ("\\boxed{-2 < x < 7}", "(-2,7)", 0),
    ],
)
def test_boxed(response: str, gold: str, reward: float) -> None:
    assert boxed(sample(response, gold)) == reward


def test_the_box_in_the_prompt_is_not_the_answer() -> None:
    assert boxed(sample("4", "4", prompt="put it in \\boxed{4}")) == 0


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("2/3", "\\frac{2}{3}", True),
        ("2/3", "\\dfrac23", True),
        ("-2/3", "-\\frac{2}{3}", True),
        ("-2/3", "\\frac{-2}{3}", True),
        ("\\frac12", "0.5", True),
        ("1/2", ".50", True),
        ("3/2", "1 1/2", True),
        ("3/2", "1\\frac{1}{2}", True),
        ("11/2", "1 1/2", False),
        ("1/12", "0.0833333333333333", True),
        ("1/12", "0.0833333333333334", True),
        ("1/12", "0.083", False),
        ("100/3", "33.3", False),
        ("33.3", "100/3", False),
        ("(1,9/2)", "(1,4.5)", True),
        ("(1,9/2)", "[1,4.5]", False),
        ("(1,2)", "(2,1)", False),
        ("{1,2}", "\\{2,1\\}", True),
        ("{1,2}", "\\{2,2\\}", False),
        ("{1,2}", "\\{1,2,3\\}", False),
        ("13", "\\text{13}", True),
        ("Sunday", "\\text{Sunday}", True),
        ("1234", "1,234", True),
        ("1234", "1{,}234", True),
        ("7.41\\%", "7.41\\%", True),
        ("50\\%", "0.5", True),
        ("50\\%", "50", False),
        ("0.5", "50\\%", False),
        ("50", "50\\%", True),
        ("-1", "\u22121", True),
        ("90", "90^\\circ", True),
        ("90", "90^{\\circ}", True),
        ("5", "5 cm", True),
        ("5", "5\\text{ cm}^2", True),
        ("5 cm", "5", True),
        ("5 cm", "5 km", False),
        ("5", "5x", False),
        ("5", "5 x", False),
        ("5", "5 million", False),
        ("5", "5 or 6", False),
        ("5", "5 6", False),
        ("7", "$7$", True),
        ("\\$7", "7", True),
        ("x+1", "x + 1", True),
        ("\\left(1,2\\right)", "(1, 2)", True),
        ("\\leftarrow", "arrow", False),
        ("0", "1/0", False),
        ("2", "((((" * 5000, False),
        ("2", "1e99999999", False),
        ("2", "2" + " " * 20000 + "x", False),
        ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}", True),
    ],
)
def test_equal(gold: str, answer: str, right: bool) -> None:
    start = time.thread_time()
    assert grading.equal(gold, answer) is right
    assert time.thread_time() - start < 5.0  # sympy may have to be loaded


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5), 0.5),
    ],
)
def test_a_number_is_a_reward(value: Any, number: float) -> None:
    assert check_value("f", sample("r"), value) == Outcome(number)


def test_none_and_nan_are_unscorable() -> None:
    assert check_value("f", sample("r"), None) == Outcome(None, "none")
    assert check_value("f", sample("r"), math.nan) == Outcome(None, "nan")


@pytest.mark.parametrize("value", [[1.0], "1", {"score": 1}, 1j, np.zeros(1), torch.zeros(2), math.inf, -math.inf, 10**400])
def test_anything_else_names_function_and_sample(value: Any) -> None:
    with pytest.raises(RewardError, match=r"reward function 'mine' returned .* for the prompt '3\+4='"):
        check_value("mine", sample("7", prompt="3+4="), value)


@pytest.mark.parametrize(
    ("response", "answer", "steps"),
    [
        ("85", "85", [(1, 0.5), (2, 0.5)]),
        ("75", "85", [(1, 0.0), (2, 0.5)]),
        ("8", 85, [(1, 0.5)]),
        ("8585", "85", [(1, 0.5), (2, 0.5), (3, 0.0), (4, 0.0)]),
        ("58", "85", [(1, 0.0), (2, 0.0)]),
        (" 85", "85", [(2, 0.5), (3, 0.5)]),  # some tokenizers begin every text with a space
        (" \n", "85", 0.0),
        ("", "85", 0.0),
    ],
)
def test_matching_characters(response: str, answer: Any, steps: Any) -> None:
    assert matching_characters(sample(response, answer)) == steps


def test_matching_characters_of_the_answer_are_worth_one() -> None:
    for length in range(1, 40):
        right = sample("7" * length, "7" * length)
        assert check_value("f", right, matching_characters(right)).value == 1.0
    with pytest.raises(ValueError, match="needs an answer with at least one character"):
        matching_characters(sample("7", " "))


def test_steps_are_summed_and_kept() -> None:
    found = check_value("f", sample("abcdef"), [(1, 0.5), (np.int64(4), True), [6, torch.tensor(-0.25)]])
    assert found == Outcome(1.25, steps=((1, 0.5), (4, 1.0), (6, -0.25)))
    assert [type(end) for end, _ in found.steps] == [int] * 3
    assert check_value("f", sample("abcdef"), ((6, 2),)) == Outcome(2.0, steps=((6, 2.0),))


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], "there are no steps; return a number for a response without steps"),
        ([0.5], "step 1 is not a pair (end in characters, reward)"),
        ([(1, 0.5), (2, 0.5, "why")], "step 2 is not a pair (end in characters, reward)"),
        ([(1, 0.5), "ab"], "step 2 is not a pair (end in characters, reward)"),
        ([(0.5, 1)], "step 1 ends at 0.5, which is not a whole number of characters"),
        ([(True, 1)], "step 1 ends at True, which is not a whole number of characters"),
        ([(1, "1")], "the reward of step 1 is '1', which is not a finite number"),
        ([(1, None)], "the reward of step 1 is None, which is not a finite number"),
        ([(1, 1.0), (2, math.nan)], "the reward of step 2 is nan, which is not a finite number"),
        ([(1, 10**400)], "which is not a finite number"),
        ([(0, 1.0)], "step 1 ends at 0, but must end after 0 and within the 4 characters of the response"),
        ([(-1, 1.0)], "step 1 ends at -1, but must end after 0 and within the 4 characters of the response"),
        ([(5, 1.0)], "step 1 ends at 5, but must end after 0 and within the 4 characters of the response"),
        ([(3, 1.0), (3, 1.0)], "step 2 ends at 3, but must end after 3 and within the 4 characters of the response"),
        ([(3, 1.0), (2, 1.0)], "step 2 ends at 2, but must end after 3 and within the 4 characters of the response"),
        ([(3, 1e308), (4, 1e308)], "the sum of the steps' rewards is infinite"),
    ],
)
def test_invalid_steps_name_function_prompt_and_step(steps: Any, problem: str) -> None:
    with pytest.raises(RewardError) as caught:
        check_value("mine", sample("abcd", prompt="3+4="), steps)
    assert str(caught.value).startswith("reward function 'mine' returned list [")
    assert str(caught.value).endswith(f"for the prompt '3+4='; {problem}") or "10000" in str(caught.value)
    assert problem in str(caught.value)


def test_a_response_without_characters_has_no_steps() -> None:
    with pytest.raises(RewardError, match=r"step 1 ends at 1, but .* within the 0 characters"):
        check_value("mine", sample(""), [(1, 1.0)])


def test_load_function(tmp_path: Path) -> None:
    (tmp_path / "beside_me.py").write_text("HALF = 0.5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside_me\n"
        "@dataclass\nclass Part:\n    x: float\n"
        "def half(sample):\n    return Part(beside_me.HALF).x\nnumber = 3\nasync def later(sample):\n    return 1\n"
    )
    name, function = resolve(f"{file}:half")
    assert (name, function(sample("r"))) == ("half", 0.5)
    assert not is_async(function)
    assert is_async(resolve(f"{file}:later")[1])
    for spec, message in {
        f"{tmp_path}/no.py:half": "does not exist",
        f"{file}:whole": "defines no 'whole'",
        f"{file}:number": "is of type int, not a function",
        f"{file}:": "given as path.py:name",
        str(file): "given as path.py:name",
    }.items():
        with pytest.raises(RewardError, match=message):
            load_function(spec)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\nimport not_there\n", "bad.py:2: ModuleNotFoundError: No module named 'not_there'"),
        ("x = 1\ndef f(:\n", "bad.py:2: SyntaxError"),
        ("import sys\nsys.exit(3)\n", "bad.py:2: SystemExit: 3"),
    ],
)
def test_import_errors_name_file_and_line(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(RewardError, match=message):
        load_function(f"{tmp_path}/bad.py:f")


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(RewardError, match="did you mean exact_match"):
        resolve("exact_mach")
    with pytest.raises(RewardError, match=r"built in: boxed, .*, matching_characters; your own: path\.py:name"):
        resolve("zzz")


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abc") == "abc"
    assert shorten("a" * 50 + "b" * 50, 11) == "aaaa...bbbb"


def test_rewards_import_no_torch() -> None:
    code = "import sys, tandem.workers.isolation.reward_process; assert not {'torch', 'numpy', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
