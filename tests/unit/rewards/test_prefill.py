"""Whether a final assistant message contains the answer or is the beginning of a response."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.platform.rewards.prefill import gives_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        (" 42\n", 42),
        ("The answer is 42.", "42"),
        ("6*7=42", 42),
        ("First 6*7.\n#### 42", "42"),
        ("**42**", "42"),
        ("<answer> 42 </answer>", "42"),
        ("It is 42<|im_end|>", "42"),
        ("so $\\boxed{42}$.", 42),
        ("\\boxed{42}, which is even", "42"),
        ("\\(x+1\\)", "x+1"),
        ("x = \\frac{1}{2}", "\\frac{1}{2}"),
        ("It is 1,234.", "1234"),
        ("It is 42.0", 42),
        ("x is 0.5", 0.5),
        ("It is -5", "-5"),
        ("It costs $5.", "5"),
        ("The capital is Paris.", "paris"),
        ("(B)", "B"),
        ("Answer: B) Paris", "B"),
        ("The answer is 42 because 6*7 is 42 in all", "42"),
        ("**Answer:** 1,234 apples", "1234"),
        ("yes", ["no", "yes"]),
        ("It is 72", {"ground_truth": "72", "style": "rule"}),
        ("true", True),
        ("2x + 1", "2x+1"),
        ("(1, 2)", "(1,2)"),
        ("4 apples", 4),
        ("The answer is $2x + 1$.", "2x+1"),
        ("The answer is \\frac{1}{2}", "1/2"),
        ("The answer is A", "A"),
        ("One line.\nAnother line.", "One line.\nAnother line."),
    ],
)
def test_texts_that_give_it(text: str, answer: Any) -> None:
    assert gives_answer(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", "42"),
        ("Let me think step by step.", "42"),
        ("Answer:", "42"),
        ("The answer is", "42"),
        ("<think>\n", "42"),
        ("\\boxed{", "42"),
        ("Step 1:", "1"),
        ("Step 1.", "1"),
        ("We begin with case 4.", "4"),
        ("The answer is a number", "A"),
        ("37+48=", "48"),
        ("37+48", "48"),
        ("It is 142", "42"),
        ("It is 0.5", "5"),
        ("It is -5", "5"),
        ("3/4", "4"),
        ("The answer is 4.5", "4"),
        ("There is no hurry, let me think.", "no"),
        ("A good way is this.", "A"),
        ("Rome", "me"),
        ("anything", None),
        ("anything", " "),
        ("?", "."),
    ],
)
def test_texts_that_break_off_before_it(text: str, answer: Any) -> None:
    assert not gives_answer(text, answer)


def test_long_texts_are_read_in_little_time() -> None:
    assert not gives_answer("answer " * 20_000 + "." * 100_000 + "a", "42")
