"""Runs that receive a signal to end, or whose weights become invalid, leave files that a restart can rely on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import records, saved, state, train

from tandem.launch.assembly import folder, inputs
from tandem.launch.assembly import run as launch_run
from tandem.launch.assembly.signals import CODES, Terminated
from tandem.launch.storage.checkpoints import Checkpoints
from tandem.launch.views.display import Unfailing
from tandem.platform.config.schema import ConfigError
from tandem.platform.experience.batch import RolloutBatch
from tandem.platform.loop.evaluate import Evaluation
from tandem.platform.loop.protocols import TrainingError
from tandem.platform.records.recorder import Recorder
from tandem.workers.roles.actor import ActorWorker
from tandem.workers.roles.critic import CriticWorker
from tandem.workers.roles.reward import RewardRank
from tandem.workers.roles.rollout import RolloutWorker

pytestmark = pytest.mark.slow

PPO = ("algo=ppo", "actor.lr=1e-2", "algo.entropy_coef=0.1", "checkpoint.every=0", "eval.every=1", "run.steps=4")
PLAIN = ("tracking.console=plain",)
DENSE = "reward.functions={matching_characters: 1.0}"


def summary(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "r" / "summary.json").read_text()))


def on_call(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, act: Callable[[], Any]) -> None:
    """Runs an action inside the `number`-th call of a method or function."""
    original, calls = getattr(owner, name), []

    def wrapped(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            act()
        return original(*given, **more)

    patch.setattr(owner, name, wrapped)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


PLACES = {
    "generate": (RolloutWorker, "generate", 6, 2),  # an evaluation before training, then one per step
    "score": (RewardRank, "submit", 11, 2),  # one call per prompt, 4 per step
    "infer": (CriticWorker, "values", 3, 2),
    "update_critic": (CriticWorker, "update", 3, 3),
    "update_actor": (ActorWorker, "update", 3, 3),
    "publish": (RolloutWorker, "finish_weights", 4, 3),
    "evaluate": (Evaluation, "run", 4, 3),
    "record": (Recorder, "step", 3, 3),
}
"""For each phase: the function to interrupt, the number of the call, and the last step completed by then."""


@pytest.mark.parametrize("place", PLACES)
def test_a_run_told_to_end_saves_the_last_step_that_is_done(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It resumes from there, bitwise as if it had not ended."""
    owner, name, number, done = PLACES[place]
    assert train(tiny_path, tmp_path / "a", *PPO) == 0
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        on_call(patch, owner, name, number, terminate)
        assert train(tiny_path, tmp_path / "b", *PPO) == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert saved(tmp_path / "b") == [done]
    ended = summary(tmp_path / "b")
    assert (ended["status"], ended["error"], ended["steps"]) == ("interrupted", "terminated (SIGTERM)", done)
    assert [record["step"] for record in records(tmp_path / "b")] == list(range(1, done + 1))
    assert train(tiny_path, tmp_path / "b", *PPO) == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")
    one, other = state(tmp_path / "a", 4), state(tmp_path / "b", 4)
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_ctrl_c_and_a_closed_terminal_end_a_run_alike(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(signal, "SIG_IGN", object())  # a suite may run with some of them ignored
    on_call(monkeypatch, ActorWorker, "update", 2, lambda: os.kill(os.getpid(), number))
    assert train(tiny_path, tmp_path, *PPO) == code
    assert saved(tmp_path) == [2]


MOMENTS: dict[str, tuple[Any, str, str | None, int | None]] = {
    "looking for checkpoints": (Checkpoints, "find", None, None),
    "claiming the folder": (launch_run, "claimed", None, None),
    "writing the settings": (folder, "versions", "interrupted", None),
    "opening the records": (Recorder, "__init__", "interrupted", None),
    "choosing the model": (inputs, "model_path", "interrupted", None),
    "reading the data": (inputs, "training_prompts", "interrupted", None),
    "loading a model": (ActorWorker, "start", "interrupted", None),
    "the first evaluation": (Evaluation, "run", "interrupted", None),
    "ending the roles": (RewardRank, "close", "finished", 0),
    "closing the records": (Recorder, "close", "finished", 0),
}
"""For each moment: the function to interrupt, and the expected status (None: no records) and exit code (None: the
signal's code).
"""


@pytest.mark.parametrize(("number", "again", "moment"), zip(cycle(CODES), cycle([False, True]), MOMENTS))
def test_a_signal_at_any_moment_leaves_a_summary_if_a_run_had_begun(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, again: bool, moment: str
) -> None:
    """Also two signals at once."""
    monkeypatch.setattr(signal, "SIG_IGN", object())  # a suite may run with some of them ignored
    owner, name, status, code = MOMENTS[moment]
    on_call(monkeypatch, owner, name, 1, lambda: [os.kill(os.getpid(), number) for _ in range(1 + again)])
    handler = signal.getsignal(number)
    assert train(tiny_path, tmp_path, *PPO, "run.steps=1") == (CODES[number] if code is None else code)
    assert signal.getsignal(number) is handler
    if status is None:
        assert not (tmp_path / "r" / "summary.json").exists()
        assert not (tmp_path / "r" / "config.yaml").exists()
    else:
        assert summary(tmp_path)["status"] == status
        assert (tmp_path / "r" / "report.html").exists()
    monkeypatch.undo()
    assert train(tiny_path, tmp_path, *PPO, "run.steps=1") == 0


def test_a_signal_while_the_embedded_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run builds the model again."""
    small = ["hidden_size=32", "intermediate_size=64", "layers=2", "heads=2"]
    own = [*(f"model.tiny.{one}" for one in small), "model.warmstart.steps=4", "model.warmstart.batch_size=4"]
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        on_call(patch, Unfailing, "progress", 3, terminate)  # after its second step
        assert train("null", tmp_path, *PPO, *own) == 143
    assert summary(tmp_path)["status"] == "interrupted"
    assert train("null", tmp_path, *PPO, *own, "run.steps=1") == 0


@pytest.mark.parametrize("apart_s", [0.01, 0.2])
def test_two_signals_soon_after_each_other(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    """Whenever the second signal arrives, the run can be resumed."""
    second = threading.Timer(apart_s, terminate)
    on_call(monkeypatch, ActorWorker, "update", 2, lambda: (terminate(), second.start()))
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # the second may come after the run has ended
    try:
        assert train(tiny_path, tmp_path, *PPO, "checkpoint.every=1") == 143
        second.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert summary(tmp_path)["status"] == "interrupted"
    assert saved(tmp_path) in ([1], [1, 2])
    assert train(tiny_path, tmp_path, *PPO, "checkpoint.every=1") == 0
    assert summary(tmp_path)["steps"] == 4


def test_a_signal_that_compiled_code_reports_as_an_error_of_its_own_is_one(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's compiled code does this while it waits."""

    def interrupted() -> None:
        try:
            terminate()
        except Terminated as ended:
            raise SystemError("wait returned a result with an exception set") from ended

    on_call(monkeypatch, RolloutWorker, "generate", 2, interrupted)
    assert train(tiny_path, tmp_path, *PPO, "eval.before_training=false", "eval.every=0") == 143
    assert summary(tmp_path)["status"] == "interrupted"
    assert saved(tmp_path) == [1]


def test_a_second_signal_does_not_wait(tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an update the weights belong to no step, so nothing is saved."""
    on_call(monkeypatch, ActorWorker, "update", 2, lambda: (terminate(), terminate()))
    assert train(tiny_path, tmp_path, *PPO) == 143
    assert saved(tmp_path) == []
    assert summary(tmp_path)["status"] == "interrupted"


def test_a_second_signal_does_not_wait_for_the_checkpoint_of_the_first(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_call(monkeypatch, RolloutWorker, "generate", 2, terminate)
    on_call(monkeypatch, Checkpoints, "save", 1, terminate)
    assert train(tiny_path, tmp_path, *PPO, "eval.before_training=false", "eval.every=0") == 143
    assert saved(tmp_path) == []
    assert summary(tmp_path)["steps"] == 1


def test_saving_at_the_end_can_be_turned_off(tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_call(monkeypatch, ActorWorker, "update", 2, terminate)
    assert train(tiny_path, tmp_path, *PPO, "checkpoint.on_signal=false") == 143
    assert saved(tmp_path) == []


def test_nothing_is_saved_twice_and_nothing_before_the_first_step(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [*PPO, "checkpoint.every=1"]
    with monkeypatch.context() as patch:
        on_call(patch, RolloutWorker, "generate", 2, terminate)
        assert train(tiny_path, tmp_path, *every) == 143
    assert saved(tmp_path) == []
    with monkeypatch.context() as patch:
        on_call(patch, RolloutWorker, "generate", 4, terminate)
        assert train(tiny_path, tmp_path, *every, "run.name=r2") == 143
    folder = tmp_path / "r2" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000001"]


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_told(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("the disk is full")

    on_call(monkeypatch, ActorWorker, "update", 2, terminate)
    monkeypatch.setattr("tandem.launch.assembly.resume.save_description", refuse)
    assert train(tiny_path, tmp_path, *PPO, "tracking.console=plain") == 143
    said = capfd.readouterr().out
    assert "no checkpoint could be written" in said
    assert "the disk is full" in said


def full_disk(*given: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("way", [[], ["checkpoint.dir=elsewhere"]], ids=["make room", "another place"])
def test_the_advice_for_a_failed_first_checkpoint_can_be_followed(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], way: list[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tandem.launch.assembly.resume.save_description", full_disk)
        assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2") == 1
    said = capfd.readouterr().err
    assert "Make room or set checkpoint.dir, and start the run again: there is no checkpoint yet, so it starts over" in said
    monkeypatch.chdir(tmp_path)
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2", *way) == 0
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
    assert (tmp_path / "r" / "attempts" / "1" / "metrics.jsonl").exists()


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["make room", "another place"])
def test_the_advice_for_a_failed_later_checkpoint_can_be_followed(
    tiny_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_elsewhere: bool,
) -> None:
    assert train(tiny_path, tmp_path / "straight", "algo=grpo", "run.steps=4") == 0
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2") == 0
    with monkeypatch.context() as patch:
        patch.setattr("tandem.launch.assembly.resume.save_description", full_disk)
        assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=4") == 1
    said = capfd.readouterr().err
    assert "Make room and start the run again: it resumes from the newest" in said
    advice = f"checkpoint.resume={tmp_path}/r/checkpoints/step-000002"
    assert f"Or set checkpoint.dir to another place and {advice}" in said
    way = [f"checkpoint.dir={tmp_path}/elsewhere", advice] if is_elsewhere else []
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=4", *way) == 0
    assert records(tmp_path) == records(tmp_path / "straight")
    if is_elsewhere:
        assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=5", way[0]) == 0


def test_a_run_whose_folder_was_deleted_does_not_end_well(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It trains to the end, and reports what is missing."""
    on_call(monkeypatch, ActorWorker, "update", 2, lambda: shutil.rmtree(tmp_path / "r"))
    assert train(tiny_path, tmp_path, *PPO) == 1
    said = capfd.readouterr()
    assert "metrics.jsonl was deleted while the run wrote to it" in said.err
    assert "finished; records in" in said.out
    assert summary(tmp_path)["steps"] == 4  # the summary could still be written


def test_each_part_of_the_outputs_is_closed_on_its_own(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    closed: list[str] = []
    monkeypatch.setattr("tandem.platform.records.recorder.write_json", full)
    monkeypatch.setattr("tandem.launch.trackers.sinks.Sinks.close", lambda self, status: closed.append(status))
    assert train(tiny_path, tmp_path, *PPO, "tracking.console=plain") == 1
    assert closed == ["finished"]
    assert (tmp_path / "r" / "report.html").exists()
    assert "the run's records are not complete: OSError: [Errno 28] No space left on device" in capfd.readouterr().err


def test_ruined_weights_are_not_saved(tiny_path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A huge learning rate leaves finite weights with which every forward pass overflows."""
    assert train(tiny_path, tmp_path, "algo=grpo", DENSE, "actor.lr=1e30", "checkpoint.every=1", "run.steps=3") == 1
    assert saved(tmp_path) == []
    error = summary(tmp_path)["error"]
    assert "after the update of step 1 the policy's log-probs are not finite" in error
    assert "actor.lr (now 1e+30)" in error


def test_ruined_weights_are_not_saved_by_a_signal_either(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    on_call(monkeypatch, RolloutWorker, "generate", 2, terminate)
    own = ("checkpoint.every=0", "eval.before_training=false", "eval.every=0", *PLAIN)
    assert train(tiny_path, tmp_path, "algo=grpo", DENSE, "actor.lr=1e30", *own) == 143
    assert saved(tmp_path) == []
    assert "no checkpoint could be written: after the update of step 1" in capfd.readouterr().out


def test_a_rate_that_was_too_high_can_be_lowered(tiny_path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As the error advises: weights with finite log-probs did not cause the update that ruined them."""
    run = ["algo=grpo", DENSE, "checkpoint.every=1", "checkpoint.keep=1"]
    assert train(tiny_path, tmp_path, *run, "run.steps=2") == 0
    assert train(tiny_path, tmp_path, *run, "run.steps=3", "actor.lr=1e30") == 1
    assert "suspect" not in summary(tmp_path)["error"]
    assert train(tiny_path, tmp_path, *run, "run.steps=3", *PLAIN) == 0
    said = capfd.readouterr().out
    assert "resuming after step 2" in said
    assert said.splitlines()[-1] == f"finished; records in {tmp_path}/r; its page is {tmp_path}/r/report.html"


def test_where_all_are_suspect_the_advice_can_be_followed(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TrainingError("actor: the gradient norm is nan")

    run = ["algo=grpo", DENSE, "checkpoint.every=1", "checkpoint.keep=1", "run.steps=3"]
    with monkeypatch.context() as patch:
        on_call(patch, ActorWorker, "update", 3, fail)
        assert train(tiny_path, tmp_path, *run) == 1
    with pytest.raises(ConfigError, match=r"Set checkpoint\.resume to the path of one to resume from it anyway"):
        train(tiny_path, tmp_path, *run)
    place = tmp_path / "r" / "checkpoints" / "step-000002"
    assert train(tiny_path, tmp_path, *run, f"checkpoint.resume={place}") == 0
    assert saved(tmp_path) == [3]


def test_a_prompt_token_that_could_not_be_sampled_ruins_nothing(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example an image token, whose logit some models set to the smallest number."""
    original = ActorWorker.logprobs

    def logprobs(self: ActorWorker, batch: RolloutBatch) -> torch.Tensor:
        return original(self, batch).index_fill(1, torch.tensor([1]), -torch.inf)

    monkeypatch.setattr(ActorWorker, "logprobs", logprobs)
    assert train(tiny_path, tmp_path, "algo=grpo", DENSE, "run.steps=1") == 0
    assert saved(tmp_path) == [1]


def test_what_the_next_step_fails_on_is_passed_over(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise TrainingError("actor: the gradient norm is nan")

    run = ["algo=grpo", DENSE, "checkpoint.every=1", "checkpoint.keep=3"]
    with monkeypatch.context() as patch:
        on_call(patch, ActorWorker, "update", 3, fail)
        assert train(tiny_path, tmp_path, *run, "run.steps=4") == 1
    assert saved(tmp_path) == [1, 2]
    assert "step-000002 holds the weights that the step began with: it is marked as suspect" in summary(tmp_path)["error"]
    assert train(tiny_path, tmp_path, *run, "run.steps=4", "tracking.console=plain") == 0
    assert "resuming after step 1" in capfd.readouterr().out
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]
    marked = [path.parent.name for path in (tmp_path / "r" / "checkpoints").glob("*/suspect.json")]
    assert marked == []  # step 2 was written again


def test_a_suspect_checkpoint_can_be_asked_for_by_name(
    tiny_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ["algo=grpo", DENSE, "checkpoint.every=1"]
    assert train(tiny_path, tmp_path, *run, "run.steps=2") == 0
    place = tmp_path / "r" / "checkpoints" / "step-000002"
    (place / "suspect.json").write_text('{"why": "planted"}')
    assert train(tiny_path, tmp_path, *run, "run.steps=3", f"checkpoint.resume={place}", "run.name=b", *PLAIN) == 0
    assert f"warning: {place} is suspect: planted" in capfd.readouterr().out


@pytest.mark.parametrize("surplus", ["drop", "keep"])
def test_an_epoch_is_one_pass_over_the_data(tiny_path: str, tmp_path: Path, surplus: str) -> None:
    """Also if a step takes several rounds to fill its batch, and after a resume."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(12)))
    own = ["algo=dapo", "data.prompts_per_step=4", f"data.train={data}", "run.epochs=1", f"algo.dynamic_surplus={surplus}"]
    own += ["reward.functions={matching_characters: 1.0}", "checkpoint.every=1"]
    assert train(tiny_path, tmp_path, *own) == 0
    steps = records(tmp_path)
    assert sum(step["samples/sampled"] for step in steps) == 12 * 2
    assert steps[-1]["data/epoch"] == 1
    assert all(
        step["data/epoch"] == pytest.approx(sum(s["sampling/rounds"] for s in steps[: n + 1]) / 3)
        for n, step in enumerate(steps)
    )
    assert saved(tmp_path)[-1] == steps[-1]["step"]  # the last step is saved
    assert train(tiny_path, tmp_path, *own) == 0
    assert records(tmp_path) == steps
