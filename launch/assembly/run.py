"""One run, from a checked configuration to its records."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.launch.assembly import inputs
from tandem.launch.assembly.folder import folder_of, make_folder, name_run
from tandem.launch.assembly.identity import for_trackers
from tandem.launch.assembly.memory_plan import MemoryPlan, advice, settle
from tandem.launch.assembly.resume import Saver, changes, check_critic, checkpoints_of, restore
from tandem.launch.assembly.roles import inline_roles, inline_workers
from tandem.launch.assembly.signals import Signals, Terminated, unwrapped
from tandem.launch.assembly.witness import Witness
from tandem.launch.compose.compose import flat
from tandem.launch.storage.checkpoint import Checkpoint, CheckpointError
from tandem.launch.storage.checkpoints import Checkpoints
from tandem.launch.storage.claim import claimed
from tandem.launch.storage.lease import only_writer
from tandem.launch.storage.sharing import shared_with
from tandem.launch.trackers.sinks import Sinks
from tandem.launch.views.display import Display, make_display, warm_start
from tandem.launch.views.panels import still_keys
from tandem.platform.algorithms.registry import Algorithm, algorithm_of
from tandem.platform.config.schema import Config
from tandem.platform.experience.masked import masked_mean
from tandem.platform.experience.metrics import HeldOut
from tandem.platform.loop.alarms import alarms
from tandem.platform.loop.driver import Driver, StepResult
from tandem.platform.loop.evaluate import Evaluation
from tandem.platform.loop.protocols import Roles, TrainingError
from tandem.platform.loop.schedules import with_total_steps
from tandem.platform.loop.spans import Spans
from tandem.platform.records.recorder import Recorder, sample_rows
from tandem.platform.records.samples import choose
from tandem.platform.system.terminal import say
from tandem.workers.cluster.cluster import connected
from tandem.workers.cluster.postmortem import WorkerFailed, is_out_of_memory, is_the_users
from tandem.workers.cluster.private_cluster import session_folder
from tandem.workers.training.state import StateError

WITNESS_S = 5.0  # wait for the witness of a killed run, which completes its records


@dataclass(frozen=True)
class Outputs:
    """The outputs of a run: records, display and trackers."""

    recorder: Recorder
    display: Display
    sinks: Sinks

    def close(self, status: str, error: str | None, code: int) -> int:
        """Reports the end of the run to every working output; returns `code`, or 1 if it is 0 and an output failed."""
        lost = []
        for what, close in (
            ("records are", lambda: self.recorder.close(status, error)),
            ("trackers are", lambda: self.sinks.close(status)),
        ):
            try:
                close()
            except Exception as failure:
                lost.append(f"the run's {what} not complete: {type(failure).__name__}: {failure}")
        page = ""
        with suppress(Exception):  # a missing report is no reason to fail
            from tandem.launch.views.page import write_report  # loads matplotlib, which only this needs

            page = f"; its page is {write_report(self.recorder.folder)}"
        self.display.phase(status)
        self.display.close()
        with suppress(OSError, UnicodeError):  # the output may be closed
            for text in [*([f"{status}: {error}"] if error else []), *lost]:
                say(f"\n{text}", error=True)
            say(f"{status}; records in {self.recorder.folder}{page}")
        return code or int(bool(lost))


def open_outputs(config: Config, folder: Path, started_at: float, found: Checkpoint | None) -> Outputs:
    """Opens the records of the run, which a resumed run continues, its display and its trackers."""
    display = make_display(config.tracking, still_keys(flat(config)))
    facts = for_trackers(config, folder, started_at) if config.tracking.sinks else {}
    facts["resumed_after"] = found.step if found else None
    with ExitStack() as opened:
        opened.callback(display.close)
        sinks = Sinks(config.tracking.sinks, facts, folder, display.note)
        opened.callback(sinks.close, "failed")
        recorder = Recorder(folder, started_at, found.step if found else None, sinks.record, display.note)
        opened.pop_all()
    return Outputs(recorder, display, sinks)


def run(config: Config, started_at: float) -> int:
    """Trains, and leaves the run's folder complete however the training ends; returns the exit code.

    Args:
        started_at: the start of the command in seconds since the epoch.
    """
    with Signals().taken() as signals:
        try:
            with signals.raised():
                return _run(config, started_at, signals)
        except Terminated as ended:  # training had not begun
            with suppress(OSError):
                say(ended, error=True)
            return ended.code


def _run(config: Config, started_at: float, signals: Signals) -> int:
    name_run(config, started_at)
    notes: list[str] = []
    checkpoints = checkpoints_of(config)
    with suppress(OSError):  # `claimed` reports the problem
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with (
        shared_with(config.run.share),
        claimed(folder_of(config), wait_s=WITNESS_S),
        only_writer(checkpoints.fs, checkpoints.root, notes.append) as checkpoints.check_alone,
    ):
        checkpoint = checkpoints.find(config.checkpoint.resume, notes.append)
        if checkpoint:
            notes.append(f"resuming after step {checkpoint.step}, from {checkpoint.path}")
        memory = MemoryPlan(config)
        notes += settle(config, checkpoint)
        if checkpoint:
            notes += [f"changed since: {change}" for change in changes(config, checkpoint)]
        signals.close()  # the run has begun: it must leave its records however it ends
        folder = make_folder(config, started_at, checkpoints, checkpoint, notes.append)
        outputs = open_outputs(config, folder, started_at, checkpoint)
        return outputs.close(*_trained(config, outputs, checkpoints, checkpoint, notes, signals, memory))


def _trained(
    config: Config,
    outputs: Outputs,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    notes: Sequence[str],
    signals: Signals,
    memory: MemoryPlan,
) -> tuple[str, str | None, int]:
    """Trains; returns status, error and exit code."""
    try:
        with signals.raised():
            for text in notes:
                outputs.display.note(text)
            train(config, outputs, checkpoints, found, signals)
    except Terminated as ended:
        return "interrupted", str(ended), ended.code
    except Exception as error:
        # The user can fix these errors from their messages. Other errors need their traceback.
        if not (is_the_users(error) or isinstance(error, WorkerFailed | TrainingError | CheckpointError | StateError)):
            with suppress(OSError):  # the output may be closed
                say(traceback.format_exc(), error=True)
        return "failed", f"{type(error).__name__}: {error}{_more_memory(config, memory, error)}", 1
    return "finished", None, 0


def _more_memory(config: Config, memory: MemoryPlan, error: Exception) -> str:
    """Advice to append to an error that is or may be a lack of memory; empty for other errors."""
    if not is_out_of_memory(error):
        return ""
    traceback.clear_frames(error.__traceback__)  # the frames hold the tensors of the pass
    text = advice(config, memory, str(error))
    return f"\n{text}" if text else ""


def train(config: Config, outputs: Outputs, checkpoints: Checkpoints, found: Checkpoint | None, signals: Signals) -> None:
    """The whole training: prepares model and data, starts the roles, restores a checkpoint if found, runs the loop."""
    display = outputs.display
    algorithm = algorithm_of(config)
    if found:
        check_critic(found, algorithm.needs_critic)
    inputs.check_engine(config)
    display.phase("model")
    path = inputs.model_path(config, warm_start(display))
    inputs.check_model(config, path)
    display.phase("data")
    data = inputs.read_inputs(config, path, display.note)
    source, evaluations, steps = data.source, data.evaluations, data.steps
    scheduled = with_total_steps(config, steps, algorithm.needs_critic)
    with roles_of(scheduled, algorithm, path, outputs, signals) as roles:
        display.begin(steps)
        outputs.recorder.devices = roles.devices
        spans = signals.spans = Spans(display.phase)
        keeper = Keeper(config, outputs, signals)
        driver = Driver(
            config,
            algorithm,
            roles,
            source,
            steps,
            evaluations,
            spans,
            keeper.step,
            keeper.first_evaluation,
        )
        if found:
            display.phase("resume")
            restore(found, driver, roles)
            if driver.is_done:
                display.note(f"nothing left to do: the checkpoint is of step {found.step}, run.steps={steps}")
        keeper.saver = Saver(config, checkpoints, driver, path, _score_of(evaluations))
        _loop(driver, keeper)
        signals.close()  # training has finished
        outputs.recorder.identity |= {"first_weights": driver.first_weights, "data": source.digest}
        display.phase("closing")


def _loop(driver: Driver, keeper: Keeper) -> None:
    """Runs the driver. Adds step and phase to errors, saves on a signal, and marks a checkpoint that led to an error."""
    saver = keeper.saver
    assert saver is not None
    try:
        with unwrapped():
            driver.run()
    except WorkerFailed as error:
        raise WorkerFailed(f"step {driver.number}, phase {driver.spans.last}: {error}") from error
    except TrainingError as error:
        where = f"step {driver.number}, phase {driver.spans.last}"
        raise TrainingError(f"{where}: {error}{_distrust(saver, error)}") from error
    except Terminated as ended:
        if keeper.config.checkpoint.on_signal:
            _rescue(saver, keeper, ended)
        raise


def _score_of(evaluations: Sequence[Evaluation]) -> str | None:
    """The metric that ranks checkpoints; None without held-out data."""
    return HeldOut(evaluations[0].name, "greedy").key if evaluations else None


def _rescue(saver: Saver, keeper: Keeper, ended: Terminated) -> None:
    """Saves the last finished step before the run ends; a second signal ends the run at once."""
    display = keeper.outputs.display
    try:
        keeper.signals.answered()
        keeper.signals.open()
        display.note(f"{ended}: saving the last finished step; a second signal ends the run at once")
        path = saver.rescue(keeper.outputs.recorder.steps)
    except Exception as error:  # the workers may have received the signal too
        display.note(f"warning: no checkpoint could be written: {error}")
        return
    if path:
        display.note(f"written: {path}")


def _distrust(saver: Saver, error: TrainingError) -> str:
    """Marks the checkpoint that the failed step began with as suspect; returns a note about it for the error message."""
    path = saver.distrust(str(error))
    if path is None:
        return ""
    begun = f"{path} holds the weights that the step began with"
    return f"\n{begun}: it is marked as suspect, and checkpoint.resume=auto skips it"


@contextmanager
def roles_of(config: Config, algorithm: Algorithm, path: str, outputs: Outputs, signals: Signals) -> Iterator[Roles]:
    """Starts the roles of the run and waits until they are ready; ends them after the body."""
    with ExitStack() as stack:
        if config.cluster.name == "inline":
            outputs.display.phase("roles")
            workers = inline_workers(config, algorithm, path)
            stack.callback(workers["reward"].close)
            yield inline_roles(config, workers)
            return
        from tandem.launch.assembly.ray_roles import RayRoles  # the only part of a run that needs Ray

        stack.enter_context(_watched_cluster(config, outputs, signals))
        outputs.display.phase("roles")
        ray_roles = RayRoles(config, algorithm, path, outputs.display.note)
        stack.callback(ray_roles.close)
        stack.callback(signals.close)  # no signal may interrupt the end of the roles
        outputs.display.phase("load")
        yield ray_roles.wait()


@contextmanager
def _watched_cluster(config: Config, outputs: Outputs, signals: Signals) -> Iterator[None]:
    """Starts or joins Ray, with a witness that records the end of the run if Ray ends it."""
    recorder = outputs.recorder
    with ExitStack() as stack:
        if config.cluster.address is None:
            signals.close()  # a half-started cluster could not be ended
        outputs.display.phase("ray" if config.cluster.address is None else "cluster")
        session = stack.enter_context(session_folder())
        witness = stack.enter_context(closing(Witness(recorder.folder, recorder.started_at, session)))
        stack.enter_context(connected(config.cluster, on_lost=lambda why: _abandon(outputs, why), folder=session))
        witness.ray_has_started()
        signals.open()
        try:
            yield
        finally:
            signals.close()


class Keeper:
    """Handles each finished step: records, samples, display, alarms, checkpoints."""

    def __init__(self, config: Config, outputs: Outputs, signals: Signals) -> None:
        self.config, self.outputs, self.signals, self._watching = config, outputs, signals, alarms(config)
        self.saver: Saver | None = None  # once there is a driver

    def step(self, step: int, result: StepResult) -> None:
        """Handles a finished step, then raises a signal that arrived while the weights changed."""
        recorder, display = self.outputs.recorder, self.outputs.display
        recorder.step(step, result.metrics, result.finished_at)
        every = self.config.tracking.samples_every
        if every and (step == 1 or step % every == 0):
            recorder.samples(step, _sample_rows(result, self.config.tracking.samples_kept))
        display.step(step, result.metrics)
        for alarm in self._watching:
            if warning := alarm(result.metrics, result.unmoved):
                display.note(warning)
        assert self.saver is not None
        self.saver.after(step, result.metrics, result.batch)
        self.signals.raise_waiting()

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        """Handles the evaluation before the first step."""
        self.outputs.recorder.first_evaluation(metrics)
        self.outputs.display.step(int(metrics["step"]), metrics)


def _sample_rows(result: StepResult, kept: int) -> list[dict[str, Any]]:
    """The readable records of rollouts of a step, chosen by `choose`."""
    batch, collected = result.batch, result.collected
    rollouts, scores = collected.rollouts, collected.scores
    rows = choose([score.reward for score in scores], [rollout.prompt.group_id for rollout in rollouts], kept)
    gap = (batch.old_logprobs - batch.rollout.rollout_logprobs).abs()
    advantages, gaps = (
        [float(masked_mean(per_token[row], batch.mask[row])) for row in rows] for per_token in (batch.advantages, gap)
    )
    return sample_rows([rollouts[row] for row in rows], [scores[row] for row in rows], advantages, gaps)


def _abandon(outputs: Outputs, why: str) -> None:
    """Ends a run whose cluster is gone: the main thread hangs in Ray and cannot end the run. The witness cleans up."""
    os._exit(outputs.close("failed", why, 1))
