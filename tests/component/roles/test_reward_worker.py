"""The reward role with real processes: the parts of scores, and callers of every kind."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reward_cases import assert_gone, rollout, samples

from tandem.platform.config.schema import ConfigError, RewardConfig
from tandem.platform.experience.batch import Rollout, Score
from tandem.platform.rewards.functions import RewardError, is_whole_reward, verifier_of
from tandem.workers.roles.reward import RewardSpec, RewardWorker

CORRECT = [Score(reward=1.0, parts={"boxed": 1.0})]
BOXED = {"functions": {"boxed": 1.0}}


def score_boxed(worker: RewardWorker) -> list[Score]:
    return worker.score([rollout("\\boxed{7}")])


def test_scores_in_the_main_thread_in_threads_and_in_an_executor(make: Callable[..., RewardWorker]) -> None:
    worker = make(**BOXED, processes=2)
    assert score_boxed(worker) == CORRECT
    found: list[list[Score]] = []
    threads = [threading.Thread(target=lambda: found.append(score_boxed(worker))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CORRECT] * 8

    async def from_executor() -> list[Score]:
        return await asyncio.get_running_loop().run_in_executor(None, score_boxed, worker)

    assert asyncio.run(from_executor()) == CORRECT


def test_a_worker_made_in_a_thread_outlives_it(make: Callable[..., RewardWorker]) -> None:
    with ThreadPoolExecutor(1) as executor:
        worker = executor.submit(lambda: make(**BOXED)).result()
    time.sleep(0.2)
    assert score_boxed(worker) == CORRECT
    assert worker._pool is not None


def test_calls_at_the_same_time_get_their_own_scores(make: Callable[..., RewardWorker]) -> None:
    worker = make(functions={"exact_match": 1.0}, processes=2)

    def call(number: int) -> list[float | None]:
        texts = [str(number) if place % 3 == 0 else "x" for place in range(100)]
        return [score.reward for score in worker.score([rollout(text, number) for text in texts])]

    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(call, range(12)))
    assert results == [[float(place % 3 == 0) for place in range(100)]] * 12


def test_scores_in_ray_actors() -> None:
    import ray

    class Async:
        def __init__(self) -> None:
            self.worker = RewardWorker(RewardConfig(**BOXED))

        async def score(self, rollouts: list[Rollout]) -> list[Score]:
            return await asyncio.get_running_loop().run_in_executor(None, self.worker.score, rollouts)

        def pids(self) -> list[int]:
            assert self.worker._pool is not None
            return [child.process.pid for child in self.worker._pool._children]

    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}}
    ray.init(address="local", num_cpus=1, include_dashboard=False, runtime_env=path, log_to_driver=False)
    try:
        right = [rollout("\\boxed{7}")]
        role = ray.remote(num_cpus=0)(RewardWorker)
        for options in ({}, {"max_concurrency": 4}):
            actor = role.options(**options).remote(RewardConfig(**BOXED))
            calls = [actor.score.remote(right) for _ in range(8)]
            assert ray.get(calls, timeout=120) == [CORRECT] * 8
            ray.kill(actor)
        actor = ray.remote(num_cpus=0)(Async).remote()
        assert ray.get([actor.score.remote(right) for _ in range(8)], timeout=120) == [CORRECT] * 8
        pids = ray.get(actor.pids.remote(), timeout=60)
        ray.kill(actor)
        assert_gone(pids, within_s=20)
    finally:
        ray.shutdown()


# Functions that misbehave


@pytest.mark.parametrize(
    ("what", "detail"),
    [("exit", "exit code 7"), ("segv", "signal SIGSEGV"), ("greedy", "functions.py:14: MemoryError")],
)
def test_a_crash_costs_one_sample(make: Callable[..., RewardWorker], functions: str, what: str, detail: str) -> None:
    worker = make(functions={}, function=functions)
    half = Score(reward=0.5, parts={"act": 0.5})
    crash = Score(reward=None, parts={"act": None}, problem="crash")
    assert worker.score([rollout(text) for text in ("a", what, "b", what)]) == [half, crash, half, crash]
    assert worker._pool is not None
    assert detail in worker._pool.submit(samples(what)).wait()[0][0].detail


def test_prints_do_not_disturb(make: Callable[..., RewardWorker], functions: str, capfd: Any) -> None:
    worker = make(functions={}, function=functions)
    assert [score.reward for score in worker.score([rollout("print"), rollout("a")])] == [0.5, 0.5]
    worker.close()  # printed output is passed on in addition to the scores
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "[1.0, null, null]\nto file descriptor 1\n"


def test_limits_threads_and_fields_reach_the_function(make: Callable[..., RewardWorker], functions: str) -> None:
    function = functions.replace(":act", ":environment")
    worker = make(functions={}, function=function, function_weight=2.0, memory_limit_mb=512)
    assert worker.score([rollout("a")]) == [Score(reward=2.0 * (2 + 10 + 3), parts={"environment": 15.0})]


# The parts of scores


def test_parts_are_weighted_and_named(make: Callable[..., RewardWorker], functions: str) -> None:
    worker = make(functions={"exact_match": 2.0, "last_number": -0.25}, function=functions, function_weight=4.0)
    right, wrong = worker.score([rollout("7"), rollout("8")])
    assert right == Score(reward=2.0 - 0.25 + 4.0 * 0.5, parts={"exact_match": 1.0, "last_number": 1.0, "act": 0.5})
    assert wrong == Score(reward=4.0 * 0.5, parts={"exact_match": 0.0, "last_number": 0.0, "act": 0.5})
    assert worker.score([]) == []


def test_none_and_nan_leave_a_sample_unscored(make: Callable[..., RewardWorker], functions: str) -> None:
    worker = make(functions={"exact_match": 1.0}, function=functions)
    scores = worker.score([rollout("none"), rollout("nan"), rollout("7")])
    assert [score.reward for score in scores] == [None, None, 1.5]
    assert [score.problem for score in scores] == ["none", "nan", None]
    assert scores[0].parts == {"exact_match": 0.0, "act": None}


def test_an_exception_names_function_sample_and_line(make: Callable[..., RewardWorker], functions: str) -> None:
    batch = [rollout("a"), rollout("a", group=6), rollout("raise", prompt="1+" * 100)]
    with pytest.raises(RewardError) as caught:
        make(functions={}, function=functions).score(batch)
    text = str(caught.value)
    assert "reward function 'act' raised on sample 1 of group 5 (prompt '1+1+1" in text
    assert "functions.py:25: KeyError: 'no such key'" in text
    assert "reward.allow_errors" in text
    assert len(text) < 500
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    scores = make(functions={}, function=functions, allow_errors=True).score(batch)
    assert [score.problem for score in scores] == [None, None, "error"]


@pytest.mark.parametrize(
    ("what", "message"),
    [("inf", "returned an infinite"), ("list", r"returned list \[1\.0\]"), ("text", "returned str '1'")],
)
def test_what_is_no_reward_stops(make: Callable[..., RewardWorker], functions: str, what: str, message: str) -> None:
    worker = make(functions={}, function=functions, allow_errors=True)
    with pytest.raises(RewardError, match=f"reward function 'act' {message}.*; sample 0 of group 5"):
        worker.score([rollout(what)])
    assert worker.score([rollout("a")])[0].reward == 0.5


@pytest.mark.parametrize("weights", [{"exact_match": 1e308, "last_number": 1e308}, {"exact_match": 1e39}])
def test_a_weighted_reward_must_be_finite_in_float32(make: Callable[..., RewardWorker], weights: dict[str, float]) -> None:
    with pytest.raises(RewardError, match="is infinite in float32"):
        make(functions=weights).score([rollout("7")])


# Start and end


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": {"exact_mach": 1.0}}, "did you mean exact_match"),
        ({"function": "gone.py:f"}, "does not exist: /"),
        ({"functions": {}}, "nothing scores responses"),
        (
            {"functions": {"exact_match": 1.0}, "function": "other.py:exact_match"},
            "two parts of the reward are called 'exact_match'",
        ),
    ],
)
def test_mistakes_are_reported_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardWorker(RewardConfig(**settings))


def test_memory_counts_bytes(make: Callable[..., RewardWorker]) -> None:
    memory = make(**BOXED).memory()
    assert set(memory) == {"peak"}
    assert memory["peak"] > 2**24


def test_what_a_reward_actor_is_sent_imports_no_transformers() -> None:
    """Only `start` may import transformers, because other calls run in threads and concurrent imports of it fail."""
    code = (
        "import sys\n"
        "from tandem.platform.experience.batch import Rollout\n"
        "from tandem.workers.roles.reward import RewardRank, RewardSpec\n"
        "from tandem.workers.cluster.runtime import process_id\n"
        "print('transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    from tandem.launch.assembly import ray_roles

    assert ray_roles.process_id.__module__ == "tandem.workers.cluster.runtime"


# The verifier of held-out accuracy


WORDY = "def wordy(sample):\n    return len(sample.response) / 10\n"
VERIFIER = "def strict(sample):\n    return float(sample.response == 'right')\n"


@pytest.fixture
def shaped(tmp_path: Path) -> Iterator[Callable[[str], RewardWorker]]:
    """A worker with a verifier, whose training reward is the length of a response."""
    (tmp_path / "own.py").write_text(WORDY + VERIFIER)
    workers: list[RewardWorker] = []

    def build(verifier: str) -> RewardWorker:
        config = RewardConfig(function=f"{tmp_path}/own.py:wordy", functions={})
        workers.append(RewardWorker(RewardSpec(config, verifier=verifier.replace("own.py", f"{tmp_path}/own.py"))))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


def test_a_verifier_is_no_part_of_the_reward(shaped: Callable[[str], RewardWorker]) -> None:
    worker = shaped("own.py:strict")
    rollouts = [rollout("right"), rollout("wrong!")]
    assert worker.verify(rollouts) == [
        Score(reward=0.5, parts={"wordy": 0.5, "strict": 1.0}),
        Score(reward=0.6, parts={"wordy": 0.6, "strict": 0.0}),
    ]
    assert worker.score(rollouts) == [Score(reward=0.5, parts={"wordy": 0.5}), Score(reward=0.6, parts={"wordy": 0.6})]
    assert shaped("exact_match").verify([rollout("7")])[0].parts == {"wordy": 0.1, "exact_match": 1.0}


def test_a_verifier_that_is_a_part_is_not_run_twice(shaped: Callable[[str], RewardWorker]) -> None:
    worker = shaped("own.py:wordy")
    assert worker.verify([rollout("right")]) == worker.score([rollout("right")])
    assert worker._verifiers is None


def test_a_verifier_has_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(WORDY)
    config = RewardConfig(function=f"{tmp_path}/a.py:wordy", functions={})
    with pytest.raises(ConfigError, match=r"eval\.function=.*b\.py:wordy: a part of the reward has the same name, wordy"):
        RewardWorker(RewardSpec(config, verifier=f"{tmp_path}/b.py:wordy"))


@pytest.mark.parametrize(
    ("function", "functions", "verifier", "whole"),
    [
        (None, {"exact_match": 1.0}, "exact_match", True),
        (None, {"exact_match": 2.0}, "exact_match", False),
        (None, {"matching_characters": 1.0}, None, False),
        (None, {"matching_characters": 1.0, "boxed": 1.0}, "boxed", False),
        (None, {"matching_characters": 0.0, "boxed": 1.0}, "boxed", True),
        ("last_number", {"boxed": 1.0}, "last_number", False),
    ],
)
def test_which_verifier(function: str | None, functions: dict[str, float], verifier: str | None, whole: bool) -> None:
    assert verifier_of(function, functions) == verifier
    assert (verifier is not None and is_whole_reward(verifier, RewardConfig(functions=functions))) is whole
