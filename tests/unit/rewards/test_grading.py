r"""Grading: a corpus of answers as models write them, and limits on the work.

`answers/right.txt` and `answers/wrong.txt` hold a gold and an answer per line, `gold | answer`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tandem.platform.rewards import grading, units
from tandem.platform.rewards.functions import Sample, boxed, last_number
from tandem.platform.rewards.latex import Unreadable, read
from tandem.platform.system.deadline import TimeIsUp, time_limit

# Wrong in this order only: the gold decides what kind of answer is expected, and where it is defined.
ONE_WAY = [
    ("50\\%", "50"),
    ("0.5", "50\\%"),
    ("\\ln(x^2)", "2\\ln x"),
    ("(-2,7)", "-2<x<7"),
    ("x>3", "2x>6"),
    ("x=5", "2x=10"),
    ("y=2x+1", "2x+1"),
    ("a=1,b=2", "2,1"),
]


def pairs(name: str) -> list[tuple[str, str]]:
    lines = (Path(__file__).parent / "answers" / name).read_text().splitlines()
    return [(gold, answer) for gold, _, answer in (line.partition(" | ") for line in lines)]


def grade(gold: str, answer: str) -> float:
    return boxed(Sample("q", f"So the answer is $\\boxed{{{answer}}}$.", gold, 1, False))


@pytest.mark.parametrize(("gold", "answer"), pairs("right.txt"))
def test_right_in_another_form(gold: str, answer: str) -> None:
    assert grade(gold, answer) == 1


@pytest.mark.parametrize(("gold", "answer"), pairs("wrong.txt"))
def test_wrong_though_it_looks_right(gold: str, answer: str) -> None:
    assert grade(gold, answer) == 0
    if (gold, answer) not in ONE_WAY:
        assert grade(answer, gold) == 0


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("5", "it is \\boxed{5"),
        ("5", "\\boxed{5} \\boxed{6}"),
        ("5", "\\boxed{5} \\boxed{"),
        ("\\frac{x+2}{7}", "\\boxed{\\frac{x}{7}+\\frac{2}{7"),
        ("2", "\\boxed{1} or \\boxed{2} or \\boxed{3}"),
        ("2", "\\boxed{}"),
        ("2", "2"),
    ],
)
def test_no_box_no_reward(gold: str, response: str) -> None:
    assert boxed(Sample("put it in \\boxed{2}", response, gold, 1, False)) == 0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2", "9^{9^{9^{9}}}"),
        ("9^{9^{9^9}}", "9^{9^{9^8}}"),
        ("2", "10^{10^{10}}"),
        ("2", "100000!"),
        ("2", "((3!)!)!"),
        ("2", "2^{1000!}"),
        ("e^{1000!}", "e^{1000!+1}"),
        ("2", "\\binom{100000000}{50000000}"),
        ("2", "((1+\\sqrt2)^{99})^{99}"),
        ("x", "((x+1)^{14})^{14}"),
        ("x", "(x+y)^{1000000}"),
        ("x", "(" * 900 + "x" + ")" * 900),
        ("x", "{" * 900 + "}" * 900),
        ("x", "\\frac{1}{" * 150 + "x" + "}" * 150),
        ("190x", "x+" * 190 + "2x"),
        ("x", "x" + " " * 100_000 + "percent"),
        ("1", "1," * 50_000),
        ("5", "5 " + "square " * 9_000),
        ("a", "a or " * 390 + "b"),
        ("x", "\\\\" * 50_000),
        ("x", "\\pm " * 50_000),
        ("\\tan(\\tan(\\tan(\\tan(\\tan x))))", "\\tan(\\tan(\\tan(\\tan(\\tan(x+10^{-30})))))"),
        (",".join(f"\\sqrt{{x+{i}}}" for i in range(45)), ",".join(f"\\sqrt{{x+{i}+10^{{-30}}}}" for i in range(45))),
    ],
    ids=range(23),
)
def test_hostile_answers_end_soon(gold: str, answer: str) -> None:
    start = time.thread_time()
    assert grade(gold, answer) == 0
    assert time.thread_time() - start < grading.TIME_LIMIT_S + 3  # the first one loads sympy


def test_the_time_limit_works_in_any_thread() -> None:
    ended = []

    def call() -> None:
        pass

    def work() -> None:
        try:
            with time_limit(0.05):
                while True:
                    call()
        except TimeIsUp:
            ended.append(sys.getprofile())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join(timeout=30)
    assert ended == [None] * 3


def test_an_answer_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grading.equal("\\sin(2x)", "2\\sin x\\cos x")
    monkeypatch.setattr(grading, "TIME_LIMIT_S", 0.0)
    assert not grading.equal("\\sin(2x)", "2\\sin x\\cos x")


def test_algebra_is_loaded_only_when_it_is_needed() -> None:
    code = r"""
import sys
from tandem.platform.rewards.functions import Sample, boxed
pairs = [("5", "5 cm"), ("5", "6"), ("5", ""), ("1/2", "0.5"), ("(1,2)", "(1,3)"), ("x", "2"), ("2", "x"), ("1,2", "2,1")]
for gold, answer in pairs:
    boxed(Sample("q", "\\boxed{%s}" % answer, gold, 1, False))
boxed(Sample("q", "", "x+1", 1, False))
assert not {"sympy", "torch", "numpy"} & set(sys.modules)
assert boxed(Sample("q", "\\boxed{1+x}", "x+1", 1, False)) == 1
assert "sympy" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_algebra_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tandem.platform.rewards.symbolic", None)
    with pytest.raises(ImportError):
        grading.equal("x+1", "1+x")


@pytest.mark.parametrize(
    ("text", "spelled_out"),
    [
        ("2x", "2\\cdot <x>"),
        ("(2)(3)", "2\\cdot 3"),
        ("1\\frac12", "1+\\frac{1}{2}"),
        ("2\\frac{x}{3}", "2\\cdot \\frac{<x>}{3}"),
        ("2\\sin^2 3x", "2\\cdot (\\sin(3\\cdot <x>))^{2}"),
        ("\\frac12\\frac34", "\\frac{1}{2}\\cdot \\frac{3}{4}"),
        ("0.25", "\\frac{1}{4}"),
        ("0.1\\overline{6}", "\\frac{1}{6}"),
        ("-x^2", "-<x>^{2}"),
        ("x^10", "<x>^{10}"),
        ("\\log_28", "\\log_{2}(8)"),
        ("a_{12}d", "<a_12>\\cdot <d>"),
        ("\\sin 30\\degree", "\\sin(\\frac{30\\cdot \\pi}{180})"),
    ],
)
def test_every_product_and_argument_is_spelled_out(text: str, spelled_out: str) -> None:
    assert read(text).text == spelled_out


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "+",
            "2 3",
            "x 2",
            "1 2/3/",
            "2^3^4",
            "5 cubed",
            "\\sin",
            "\\frac{1}",
            "\\sqrt",
            "(2",
            "2)",
            "{2",
            "x_",
            "2_3",
        ),
        *(
            "f'",
            "\\sum_{i=1}^2 i",
            "\\int x dx",
            "x=2",
            "1,2",
            "5\\%",
            "\\ldots",
            "\\pm 2",
            "\\sin(x)^2",
            "|x",
            "\\text{a}",
        ),
        *(
            "\\overline{5}",
            "\\operatorname{lcm}(2,3)",
            "5!!",
            "é",
            "\\unknown",
            "\\left",
            "2&3",
            "x^",
            "^2",
            "!",
            "a:b",
            "\\",
        ),
    ],
)
def test_what_is_not_read_to_the_last_sign_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("5 cm", ("5", "cm")),
        ("5 centimetres", ("5", "cm")),
        ("5 square feet", ("5", "foot^2")),
        ("5 cm^{2}", ("5", "cm^2")),
        ("5 cubic meters per second", ("5", "m^3 s^-1")),
        ("5 m/s^2", ("5", "m s^-2")),
        ("5 kg m^2/s^2", ("5", "kg m^2 s^-2")),
        ("5cm", ("5", "cm")),
        ("5m", ("5m", "")),
        ("5 Apples", ("5", "apple")),
        ("5 squared", ("5 squared", "")),
        ("5 square", ("5 square", "")),
        ("cm", ("cm", "")),
        ("", ("", "")),
    ],
)
def test_units(text: str, found: tuple[str, str]) -> None:
    assert units.split(text) == found


NUMBER_WORDS = """
squared cubed factorial half halves third thirds quarter quarters fourth fifth tenth dozen pair pairs couple score gross
hundred thousand million mil mill billion trillion percent percentage permille ppm root sqrt times twice fold double triple
power exponent inverse reciprocal negative minus plus modulo mod pi log sin cos choose ten one
"""


def test_no_unit_means_a_number() -> None:
    words = re.findall("[a-z]+", NUMBER_WORDS)
    assert not [word for word in words if units.canonical(word)]


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("the point is (1,234)", "1234", 0),
        ("the point is (1,234)", "234", 1),
        ("in [1,234]", "1234", 0),
        ("the set \\{1,234\\}", "1234", 0),
        ("the set {1,234}", "1234", 0),
        ("\\boxed{1,234}", "1234", 1),
        ("**1,234** (one thousand)", "1234", 1),
        ("5 factorial", "5", 1),
        ("5 cm", "5 cm", 1),
        ("it costs $1,234.", "\\$1,234", 1),
    ],
)
def test_last_number_in_running_text(response: str, answer: str, reward: float) -> None:
    assert last_number(Sample("q", response, answer, 1, False)) == reward
