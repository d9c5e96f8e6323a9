"""One run, from a checked configuration to its records."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.launch.assembly import prepare
from tandem.launch.assembly.facts import for_trackers
from tandem.launch.assembly.folder import folder_of, make_folder, name_run
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
from tandem.launch.views.page import write_report
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

WITNESS_S = 5.0  # for the witness of a run that was killed, which completes its records


@dataclass(frozen=True)
class Outputs:
    """Where a run writes and shows what it does."""

    recorder: Recorder
    display: Display
    sinks: Sinks

    def close(self, status: str, error: str | None, code: int) -> int:
        """Says wherever it still can how the run has ended; returns `code`, or 1 for a finished run without its records."""
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
        with suppress(Exception):  # a page to look at is not worth an error
            page = f"; its page is {write_report(self.recorder.folder)}"
        self.display.phase(status)
        self.display.close()
        with suppress(OSError, UnicodeError):  # nobody may be reading any more
            for text in [*([f"{status}: {error}"] if error else []), *lost]:
                say(f"\n{text}", error=True)
            say(f"{status}; records in {self.recorder.folder}{page}")
        return code or int(bool(lost))


def open_outputs(config: Config, folder: Path, started_at: float, found: Checkpoint | None) -> Outputs:
    """The records of the run in its folder, continued where it goes on from a checkpoint, and its trackers."""
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
    """Trains, and leaves the run's folder complete however it ends; returns the exit code.

    Args:
        started_at: seconds since the epoch at which the command began.
    """
    with Signals().taken() as signals:
        try:
            with signals.raised():
                return _run(config, started_at, signals)
        except Terminated as ended:  # nothing was begun
            with suppress(OSError):
                say(ended, error=True)
            return ended.code


def _run(config: Config, started_at: float, signals: Signals) -> int:
    name_run(config, started_at)
    notes: list[str] = []
    checkpoints = checkpoints_of(config)
    with suppress(OSError):  # told below, with the run's own folder
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with (
        shared_with(config.run.share),
        claimed(folder_of(config), wait_s=WITNESS_S),
        only_writer(checkpoints.fs, checkpoints.root, notes.append) as checkpoints.check_alone,
    ):
        found = checkpoints.find(config.checkpoint.resume, notes.append)
        if found:
            notes.append(f"going on after step {found.step}, from {found.path}")
        memory = MemoryPlan(config)
        notes += settle(config, found)
        if found:
            notes += [f"changed since: {change}" for change in changes(config, found)]
        signals.close()  # from here on a run has begun, and leaves its records whatever ends it
        folder = make_folder(config, started_at, checkpoints, found, notes.append)
        outputs = open_outputs(config, folder, started_at, found)
        return outputs.close(*_trained(config, outputs, checkpoints, found, notes, signals, memory))


def _trained(
    config: Config,
    outputs: Outputs,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    notes: Sequence[str],
    signals: Signals,
    memory: MemoryPlan,
) -> tuple[str, str | None, int]:
    """How the training ended: status, error, exit code."""
    try:
        with signals.raised():
            for text in notes:
                outputs.display.note(text)
            train(config, outputs, checkpoints, found, signals)
    except Terminated as ended:
        return "interrupted", str(ended), ended.code
    except Exception as error:
        # These are for the user to mend: the message says it all. Anything else wants its traceback.
        if not (is_the_users(error) or isinstance(error, WorkerFailed | TrainingError | CheckpointError | StateError)):
            with suppress(OSError):  # nobody may be reading any more
                say(traceback.format_exc(), error=True)
        return "failed", f"{type(error).__name__}: {error}{_more_memory(config, memory, error)}", 1
    return "finished", None, 0


def _more_memory(config: Config, memory: MemoryPlan, error: Exception) -> str:
    """What to set, behind the text of an error that is or may be a lack of memory; empty for others."""
    if not is_out_of_memory(error):
        return ""
    traceback.clear_frames(error.__traceback__)  # they hold the tensors of the pass
    said = advice(config, memory, str(error))
    return f"\n{said}" if said else ""


def train(config: Config, outputs: Outputs, checkpoints: Checkpoints, found: Checkpoint | None, signals: Signals) -> None:
    """The whole training: model and data, roles up, loop from the checkpoint found or from its beginning, roles down."""
    display = outputs.display
    algorithm = algorithm_of(config)
    if found:
        check_critic(found, algorithm.needs_critic)
    prepare.check_engine(config)
    display.phase("model")
    path = prepare.model_path(config, warm_start(display))
    prepare.check_model(config, path)
    display.phase("data")
    data = prepare.inputs(config, path, display.note)
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
                display.note(f"nothing is left to do: the checkpoint is of step {found.step}, run.steps={steps}")
        keeper.saver = Saver(config, checkpoints, driver, path, _score_of(evaluations))
        _loop(driver, keeper)
        signals.close()  # the run has got to its end
        outputs.recorder.identity |= {"first_weights": driver.first_weights, "data": source.digest}
        display.phase("closing")


def _loop(driver: Driver, keeper: Keeper) -> None:
    """Runs the driver; what ends it early is told with its step and phase, and saves or marks what it can."""
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
    """The metric by which a checkpoint is one of the best."""
    return HeldOut(evaluations[0].name, "greedy").key if evaluations else None


def _rescue(saver: Saver, keeper: Keeper, ended: Terminated) -> None:
    """Saves what is done before the run ends; a second signal ends it at once."""
    display = keeper.outputs.display
    try:
        keeper.signals.answered()
        keeper.signals.open()
        display.note(f"{ended}: saving the last step that is done; once more ends the run at once")
        path = saver.rescue(keeper.outputs.recorder.steps)
    except Exception as error:  # the workers may have been told to end too
        display.note(f"warning: no checkpoint could be written: {error}")
        return
    if path:
        display.note(f"written: {path}")


def _distrust(saver: Saver, error: TrainingError) -> str:
    """Marks the checkpoint that the failed step began with; returns what there is to say of it."""
    path = saver.distrust(str(error))
    if path is None:
        return ""
    begun = f"{path} holds the weights that the step began with"
    return f"\n{begun}: it is marked as suspect, and checkpoint.resume=auto passes it over"


@contextmanager
def roles_of(config: Config, algorithm: Algorithm, path: str, outputs: Outputs, signals: Signals) -> Iterator[Roles]:
    """The roles of the run, ready; ended when the body ends, however that is."""
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
        stack.callback(signals.close)  # nothing interrupts what ends the roles
        outputs.display.phase("load")
        yield ray_roles.wait()


@contextmanager
def _watched_cluster(config: Config, outputs: Outputs, signals: Signals) -> Iterator[None]:
    """Ray, and who tells how the run ended if Ray ends it."""
    recorder = outputs.recorder
    with ExitStack() as stack:
        if config.cluster.address is None:
            signals.close()  # half a cluster could not be ended
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
    """What is done with each step: records, samples, display, alarms, checkpoints."""

    def __init__(self, config: Config, outputs: Outputs, signals: Signals) -> None:
        self.config, self.outputs, self.signals, self._watching = config, outputs, signals, alarms(config)
        self.saver: Saver | None = None  # once there is a driver

    def step(self, step: int, result: StepResult) -> None:
        """A step is done; a signal that came while the weights moved ends the run now."""
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
        """The evaluation before the first step is done."""
        self.outputs.recorder.first_evaluation(metrics)
        self.outputs.display.step(int(metrics["step"]), metrics)


def _sample_rows(result: StepResult, kept: int) -> list[dict[str, Any]]:
    """Rollouts of a step as a person reads them, chosen by `choose`."""
    batch, collected = result.batch, result.collected
    rollouts, scores = collected.rollouts, collected.scores
    rows = choose([score.reward for score in scores], [rollout.prompt.group_id for rollout in rollouts], kept)
    gap = (batch.old_logprobs - batch.rollout.rollout_logprobs).abs()
    advantages, gaps = (
        [float(masked_mean(per_token[row], batch.mask[row])) for row in rows] for per_token in (batch.advantages, gap)
    )
    return sample_rows([rollouts[row] for row in rows], [scores[row] for row in rows], advantages, gaps)


def _abandon(outputs: Outputs, why: str) -> None:
    """Ends a run whose cluster is gone: the main thread waits for it and can do nothing more. The witness clears up."""
    os._exit(outputs.close("failed", why, 1))
