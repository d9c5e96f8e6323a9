"""One run, from a checked configuration to its records."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem.launch import prepare, report
from tandem.launch.checkpoints import Checkpoint, CheckpointError, Checkpoints
from tandem.launch.display import Display, make_display
from tandem.launch.facts import about, for_trackers
from tandem.launch.resume import Saver, changes, check_critic, checkpoints_of, restore
from tandem.launch.roles import RayRoles, inline_roles, inline_workers
from tandem.launch.sinks import Sinks
from tandem.launch.versions import versions
from tandem.platform.alarms import Alarm, alarms
from tandem.platform.algorithms import Algorithm, resolve
from tandem.platform.config import Config, ConfigError
from tandem.platform.driver import Driver, StepResult
from tandem.platform.masked import masked_mean
from tandem.platform.protocols import Roles
from tandem.platform.records import Recorder, sample_rows, write_json, write_text
from tandem.platform.redact import redacted
from tandem.platform.spans import Spans
from tandem.workers.calls import WorkerFailed, is_the_users
from tandem.workers.cluster import connected
from tandem.workers.tokenizer import load_tokenizer
from tandem.workers.trainer import TrainingError
from tandem.workers.training_state import StateError

INTERRUPTED, TERMINATED = 130, 143  # exit codes, as a shell counts them


class Terminated(BaseException):
    """SIGTERM arrived."""


@dataclass(frozen=True)
class Outputs:
    """Where a run writes and shows what it does."""

    recorder: Recorder
    display: Display
    sinks: Sinks

    def close(self, status: str, error: str | None, code: int) -> int:
        """Says everywhere how the run has ended; returns `code`."""
        self.recorder.close(status, error)
        self.sinks.close(status)
        with suppress(Exception):  # a page to look at is not worth an error
            report.write(self.recorder.folder)
        self.display.phase(status)
        self.display.close()
        with suppress(OSError, UnicodeError):  # nobody may be reading any more
            if error:
                print(f"\n{status}: {redacted(error)}", file=sys.stderr)
            print(f"{status}; records in {self.recorder.folder}", flush=True)
        return code


def open_outputs(config: Config, folder: Path, started_at: float, found: Checkpoint | None) -> Outputs:
    """The records of the run in its folder, continued where it goes on from a checkpoint, and its trackers."""
    display = make_display(config.tracking)
    facts = for_trackers(config, folder, started_at) if config.tracking.sinks else {}
    facts["resumed_after"] = found.step if found else None
    sinks = Sinks(config.tracking.sinks, facts, folder, display.note)
    recorder = Recorder(folder, started_at, found.step if found else None, sinks.record, display.note)
    return Outputs(recorder, display, sinks)


def run(config: Config, started_at: float) -> int:
    """Trains, and leaves the run's folder complete however it ends; returns the exit code.

    Args:
        started_at: seconds since the epoch at which the command began.
    """
    name_run(config, started_at)
    notes: list[str] = []
    checkpoints = checkpoints_of(config)
    found = checkpoints.find(config.checkpoint.resume, notes.append)
    if found:
        notes.append(f"going on after step {found.step}, from {found.path}")
        notes += [f"changed since: {change}" for change in changes(config, found)]
    with claimed(Path(config.run.dir) / str(config.run.name)):
        folder = make_folder(config, started_at, checkpoints, found)
        return _recorded(config, folder, started_at, checkpoints, found, notes)


def _recorded(
    config: Config,
    folder: Path,
    started_at: float,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    notes: Sequence[str],
) -> int:
    outputs = open_outputs(config, folder, started_at, found)
    try:
        for text in notes:
            outputs.display.note(text)
        train(config, outputs, checkpoints, found)
    except KeyboardInterrupt:
        return outputs.close("interrupted", "interrupted (Ctrl-C)", INTERRUPTED)
    except Terminated:
        return outputs.close("interrupted", "terminated (SIGTERM)", TERMINATED)
    except Exception as error:
        # These are for the user to mend: the message says it all. Anything else wants its traceback.
        if not (is_the_users(error) or isinstance(error, WorkerFailed | TrainingError | CheckpointError | StateError)):
            with suppress(OSError):  # nobody may be reading any more
                print(redacted(traceback.format_exc()), file=sys.stderr)
        return outputs.close("failed", f"{type(error).__name__}: {error}", 1)
    return outputs.close("finished", None, 0)


def train(config: Config, outputs: Outputs, checkpoints: Checkpoints, found: Checkpoint | None) -> None:
    """The whole training: model and data, roles up, loop from the checkpoint found or from its beginning, roles down."""
    signal.signal(signal.SIGTERM, _terminate)
    display = outputs.display
    algorithm = resolve(config.algo.name, config.adv_estimator, config.algo.policy_loss)
    if found:
        check_critic(found, algorithm.needs_critic)
    prepare.check_engine(config)
    display.phase("model")
    path = prepare.model_path(config, lambda step, total: _show_warm_start(display, step, total))
    prepare.check_context(config, path)
    display.phase("data")
    tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    prepare.check_critic(config, tokenizer)
    prepare.check_stop_ids(config, tokenizer)
    source = prepare.training_prompts(config, tokenizer, display.note)
    evaluations = prepare.evaluations(config, tokenizer, display.note)
    steps = prepare.training_steps(config, len(source.rows))
    display.phase("roles")
    watching = alarms()
    with roles_of(config, algorithm, path, lambda why: _abandon(outputs, why)) as roles:
        display.begin(steps)
        outputs.recorder.devices = roles.devices
        spans = Spans(display.phase)
        driver = Driver(
            config,
            algorithm,
            roles,
            source,
            steps,
            evaluations,
            spans,
            on_step=lambda step, result: _keep(config, outputs, watching, saver, step, result),
            on_eval=lambda metrics: _keep_first(outputs, metrics),
        )
        score = f"eval/{evaluations[0].name}/greedy" if evaluations else None
        saver = Saver(config, checkpoints, driver, path, score)
        try:
            if found:
                display.phase("resume")
                if found.step >= steps:
                    display.note(f"nothing is left to do: the checkpoint is of step {found.step}, run.steps={steps}")
                restore(found, driver, roles)
            driver.run()
            outputs.recorder.identity |= {"first_weights": driver.first_weights, "data": source.digest}
        except WorkerFailed as error:
            raise WorkerFailed(f"step {driver.number}, phase {spans.last}: {error}") from error
        display.phase("closing")


@contextmanager
def roles_of(config: Config, algorithm: Algorithm, path: str, on_head_lost: Callable[[str], None]) -> Iterator[Roles]:
    """The roles of the run, ready; ended when the body ends, however that is."""
    with ExitStack() as stack:
        if config.cluster.name == "inline":
            workers = inline_workers(config, algorithm, path)
            stack.callback(workers["reward"].close)
            yield inline_roles(config, workers)
            return
        cpus = stack.enter_context(connected(config.cluster, on_head_lost=on_head_lost))
        signal.signal(signal.SIGTERM, _terminate)  # again: ray.init sets a handler of its own
        ray_roles = RayRoles(config, algorithm, path, cpus)
        stack.callback(ray_roles.close)
        yield ray_roles.wait()


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """A folder, made if need be, which no other process writes runs into during the body.

    The lock is that of the descriptor which is given; a child that inherits it holds the folder on.

    Raises:
        ConfigError: another process does, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir={folder.parent}: the run's folder cannot be written: {error}") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process trains into {folder}. Wait for it to end, or set another folder or name"
        ) from error
    except OSError:  # some network file systems cannot lock a folder
        return


def name_run(config: Config, started_at: float) -> None:
    """Fills in run.name."""
    if config.run.name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started_at))
        config.run.name = f"{config.algo.name}-seed{config.run.seed}-{stamp}-{os.getpid()}"


def make_folder(config: Config, started_at: float, checkpoints: Checkpoints, found: Checkpoint | None) -> Path:
    """The run's folder with `config.yaml`, `versions.json` and `run.json`.

    Raises:
        ConfigError: it holds a run already, and this one does not go on from its newest checkpoint.
    """
    folder = Path(config.run.dir) / str(config.run.name)
    if config.checkpoint.dir is not None and checkpoints.has_any() and not checkpoints.is_newest(found):
        raise ConfigError(
            f"{checkpoints.root} holds checkpoints of a run of this name, and with checkpoint.resume="
            f"{config.checkpoint.resume} this one does not go on from the newest. Set another run.name"
        )
    if (folder / "metrics.jsonl").exists() and not _never_began(folder) and not checkpoints.is_newest(found):
        if found is None:
            raise ConfigError(
                f"{folder} holds a run already, without a checkpoint to go on from (checkpoint.resume="
                f"{config.checkpoint.resume}). Set another run.name, or move the folder away"
            )
        raise ConfigError(
            f"{folder} holds a run already, and checkpoint.resume={config.checkpoint.resume} is not its newest checkpoint. "
            "Set another run.name to branch off from there"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)
        write_text(folder / "config.yaml", redacted(_as_yaml(config)))
        write_json(folder / "versions.json", versions())
        write_json(folder / "run.json", about(config, started_at))
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir}: the run's folder cannot be written: {error}") from error
    checkpoints.check_writable()
    return folder


def _never_began(folder: Path) -> bool:
    """Whether the run in `folder` ended before it measured anything, so that nothing is lost with it."""
    return (folder / "summary.json").exists() and (folder / "metrics.jsonl").stat().st_size == 0


def _as_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _keep(config: Config, outputs: Outputs, watching: list[Alarm], saver: Saver, step: int, result: StepResult) -> None:
    recorder, display = outputs.recorder, outputs.display
    recorder.step(step, result.metrics, result.finished_at)
    every = config.tracking.samples_every
    if every and (step == 1 or step % every == 0):
        kept, batch = config.tracking.samples_kept, result.batch
        gap = (batch.old_logprobs - batch.rollout.rollout_logprobs).abs()
        advantages, gaps = (
            [float(masked_mean(values, mask)) for values, mask in zip(per_token[:kept], batch.mask[:kept], strict=True)]
            for per_token in (batch.advantages, gap)
        )
        collected = result.collected
        recorder.samples(step, sample_rows(collected.rollouts[:kept], collected.scores[:kept], advantages, gaps))
    display.step(step, result.metrics)
    for alarm in watching:
        if warning := alarm(result.metrics, result.unmoved):
            display.note(warning)
    saver.after(step, result.metrics)


def _keep_first(outputs: Outputs, metrics: dict[str, float]) -> None:
    outputs.recorder.first_evaluation(metrics)
    outputs.display.step(int(metrics["step"]), metrics)


def _show_warm_start(display: Display, step: int, total: int) -> None:
    if step == 1:
        display.note(f"building the embedded model: {total} steps of supervised fine-tuning, once; then it is in the cache")
    display.phase(f"warm start {step}/{total}")


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def _abandon(outputs: Outputs, why: str) -> None:
    """Ends a run whose cluster is gone: the main thread waits for it and can do nothing more."""
    code = outputs.close("failed", why, 1)
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)
    os._exit(code)
