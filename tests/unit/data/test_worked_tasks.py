"""Embedded tasks whose responses show their steps, and the task with sums of several lengths."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import ConfigError, TaskConfig
from tandem.platform.data.task import Task
from tandem.platform.data.tasks import TASKS, load_task
from tandem.platform.data.worked_tasks import SOLVABLE, SOLVED, pupils_knowledge, worked_chain, worked_sum
from tandem.platform.planning.validate import validate
from tandem.platform.rewards.functions import REWARDS, Sample


def never(one: int, other: int) -> bool:
    return False


def test_columns_are_worked_from_the_right_with_their_carries() -> None:
    assert worked_sum(347, 285, 3, never) == "7+5=12,4+8+1=13,3+2+1=6"
    assert worked_sum(900, 900, 3, never) == "0+0=0,0+0=0,9+9=18"
    assert worked_sum(347, 285, 3, lambda one, other: one == 4) == "7+5=12,4+8+1?"
    assert worked_sum(347, 285, 3, lambda one, other: True) == "7+5?"


def test_a_chain_is_worked_modulo_ten() -> None:
    assert worked_chain([3, 8, 4], never) == "3+8=1,1+4=5"
    assert worked_chain([3, 8, 4], lambda one, other: (one, other) == (1, 4)) == "3+8=1,1+4?"


@pytest.mark.parametrize("steps", [2, 4, 8, 16])
def test_a_pupil_solves_the_same_share_for_any_number_of_steps(steps: int) -> None:
    """Pairs are independent, so a prompt is solved with the power of the probability of one step."""
    knowledge = pupils_knowledge(steps, seed=0)
    assert sum(1 - chance for chance in knowledge.values()) / 100 == pytest.approx(SOLVED ** (1 / steps), abs=0.006)
    assert sum(chance < 1 for chance in knowledge.values()) / 100 == pytest.approx(SOLVABLE ** (1 / steps), abs=0.006)
    assert knowledge == pupils_knowledge(steps, seed=0) != pupils_knowledge(steps, seed=1)


def rewards(task: Task, name: str) -> list[float]:
    """Of the worked examples, by the task's own reward."""
    answers = {str(row.prompt): row.answer for row in task.train}
    score = REWARDS[TASKS[name].reward]
    found = []
    for example in task.worked_examples[:4000]:
        sample = Sample(example.prompt, example.completion, answers[example.prompt], len(example.completion), False)
        found.append(float(score(sample)))
    return found


@pytest.mark.parametrize(
    "config",
    [
        TaskConfig("worked_addition", digits=3),
        TaskConfig("worked_addition", digits=1, eval_size=16),
        TaskConfig("chained_addition", steps=2),
        TaskConfig("chained_addition", steps=16),
    ],
)
def test_examples_are_solved_as_often_as_planned_and_show_it(config: TaskConfig) -> None:
    task = load_task(config)
    found = rewards(task, config.name)
    gave_up = ["?" in example.completion for example in task.worked_examples[:4000]]
    assert sum(found) / len(found) == pytest.approx(SOLVED, abs=0.1)
    lucky = [reward for reward, given_up in zip(found, gave_up, strict=True) if given_up]
    assert [reward for reward, given_up in zip(found, gave_up, strict=True) if not given_up] == [1.0] * gave_up.count(False)
    assert sum(lucky) / len(lucky) < 0.15  # a guess
    assert not {str(row.prompt) for row in task.train} & {str(row.prompt) for row in task.held_out}
    written = {c for row in task.train for c in f"{row.prompt}{row.answer}"}
    written |= {c for example in task.worked_examples for c in example.completion}
    assert written <= set(task.characters)
    longest = max(len(example.completion) for example in task.worked_examples) + 1
    assert longest <= TASKS[config.name].response_tokens(config) <= longest + 12


def test_every_length_is_equally_frequent() -> None:
    task = load_task(TaskConfig("mixed_addition", digits=4, eval_size=80))
    for rows in (task.train, task.held_out):
        lengths = Counter(len(re.split(r"[+=]", str(row.prompt))[0]) for row in rows)
        assert lengths == dict.fromkeys((1, 2, 3, 4), len(rows) // 4)
    assert all(row.answer == str(sum(map(int, str(row.prompt)[:-1].split("+")))) for row in task.train[:1000])
    held = {str(row.prompt) for row in task.held_out}
    assert len(held) == 80
    assert not held & {str(row.prompt) for row in task.train}


def test_longer_sums_fill_what_short_ones_lack() -> None:
    """A quarter of the hundred one-digit sums may be held out; the other 231 of 256 are of three lengths."""
    held_out = load_task(TaskConfig("mixed_addition", digits=4)).held_out
    assert Counter(len(str(row.prompt)) // 2 - 1 for row in held_out) == {1: 25, 2: 77, 3: 77, 4: 77}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_made_with_its_defaults(name: str) -> None:
    config, given = compose([f"task={name}"])
    validate(config, given)
    task = load_task(config.task)
    assert (task.name, len(task.held_out)) == (name, 256)
    assert max(len(str(row.prompt)) for row in task.train) <= config.data.max_prompt_tokens


def test_more_held_out_sums_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"can hold out 25 prompts; set task.eval_size=25 or raise task.digits"):
        load_task(TaskConfig("mixed_addition", digits=1))


@pytest.mark.parametrize(("name", "size"), [("worked_addition", "digits=1"), ("chained_addition", "steps=1")])
def test_too_few_prompts_are_told_with_the_setting_that_sizes_the_task(name: str, size: str) -> None:
    key, _, _ = size.partition("=")
    with pytest.raises(ConfigError, match=rf"task.{size} has 100 prompts; .* or raise task.{key}"):
        load_task(TaskConfig(name, digits=1, steps=1))


def test_the_task_chooses_its_reward_and_its_longest_response() -> None:
    config, _ = compose(["task=chained_addition", "task.steps=16"])
    assert config.reward.functions == {"last_number": 1.0}
    assert config.rollout.max_response_tokens == 102
    config, _ = compose(["task=chained_addition", "reward.functions.boxed=1", "rollout.max_response_tokens=9"])
    assert (config.reward.functions, config.rollout.max_response_tokens) == ({"boxed": 1.0}, 9)
    config, _ = compose(["task=chained_addition", "data.train=/d.jsonl", "model.path=/m"])
    assert (config.reward.functions, config.rollout.max_response_tokens) == ({"exact_match": 1.0}, 512)
