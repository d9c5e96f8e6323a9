"""Saves and resumes runs, and checks which settings have changed since a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.launch.assembly.folder import folder_of
from tandem.launch.compose.compose import flat
from tandem.launch.storage.checkpoint import DRIVER, FACTS, Checkpoint
from tandem.launch.storage.checkpoints import Checkpoints
from tandem.launch.storage.stores import CHECKPOINTS
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.experience.batch import TrainBatch
from tandem.platform.experience.metrics import Metrics
from tandem.platform.loop.driver import Driver
from tandem.platform.loop.protocols import Roles, TrainingError
from tandem.platform.system.files import refuse_links
from tandem.platform.system.readers import parsed
from tandem.workers.cluster.postmortem import is_the_users
from tandem.workers.models.description import save_description

FIXED = (
    *("run.seed", "data.seed", "data.shuffle", "data.prompts_per_step", "rollout.samples_per_prompt", "rollout.seed"),
    *("model.path", "model.tiny.", "model.warmstart.", "critic.path", "critic.head"),
)
"""Settings that define the meaning of a saved state: the order of prompts, and the model. A dot includes all keys below."""
OWN = ("run.name", "run.dir", "run.steps", "run.epochs", "checkpoint.", "tracking.", "dry_run", "cluster.")
"""Settings whose changes are not reported."""


@dataclass(frozen=True)
class LoopState:
    """The content of `driver.json`: the result of `Driver.state`."""

    step: int
    version: int
    critic_ready: bool
    kl_coef: float
    rows: int
    data: str
    rounds: int
    leftover: list[dict[str, Any]]
    reward_moments: list[float]


@dataclass(frozen=True)
class RankFacts:
    """An entry of `facts.json`: a rank's state besides tensors."""

    updates: int
    random: dict[str, Any]


def checkpoints_of(config: Config) -> Checkpoints:
    """The checkpoints of the run: in its folder, or in a folder with its name below `checkpoint.dir`.

    Raises:
        ConfigError: the checkpoint folder inside the run's folder is a link.
    """
    place = config.checkpoint.dir
    if place is None:
        folder = folder_of(config)
        refuse_links(folder / CHECKPOINTS, folder)
        url = f"{config.run.dir}/{config.run.name}/{CHECKPOINTS}"
    else:
        url = f"{place if place.endswith('://') else place.rstrip('/') + '/'}{config.run.name}"
    return Checkpoints(url, config.checkpoint.keep, config.checkpoint.keep_best)


def changes(config: Config, checkpoint: Checkpoint) -> list[str]:
    """Settings that have changed since the checkpoint, as text.

    Raises:
        ConfigError: a changed setting makes the saved state unusable.
    """
    now, before = flat(config), checkpoint.settings
    different = {key: (before.get(key), value) for key, value in now.items() if before.get(key) != value}
    fixed = [key for key in different if _is_among(key, FIXED)]
    if fixed:
        was, value = different[fixed[0]]
        raise ConfigError(
            f"{checkpoint.path} was written with {fixed[0]}={was}, but this run has {value}, so it cannot resume. Set it "
            "back, or start a new run with checkpoint.resume=never; to keep the weights, set model.path to an export by "
            "launch/export.py"
        )
    told = {key for key in different if not _is_among(key, OWN)}
    if any(
        optimizer.lr_schedule != "constant" and optimizer.lr_total_steps is None
        for optimizer in (config.actor, config.critic)
    ):
        told |= different.keys() & {"run.steps", "run.epochs"}  # the learning rates decay over them
    return [f"{key} {was} -> {value}" for key, (was, value) in different.items() if key in told]


def check_critic(checkpoint: Checkpoint, needs_critic: bool) -> None:
    """Refuses a checkpoint with a critic for a run without a critic, and vice versa.

    Raises:
        ConfigError: only one of them has a critic.
    """
    if checkpoint.has("critic") != needs_critic:
        had, has = ("has a", "needs none") if checkpoint.has("critic") else ("has no", "needs one")
        raise ConfigError(f"{checkpoint.path} {had} critic, but adv_estimator {has}. Set adv_estimator back")


def restore(checkpoint: Checkpoint, driver: Driver, roles: Roles) -> None:
    """Restores loop and roles from a checkpoint.

    Raises:
        ConfigError: the data has changed, or a file has invalid content. StateError: the model is a different one.
        CheckpointError: a file has changed since it was written.
    """
    state = checkpoint.driver()
    loop = parsed(state, LoopState, f"{checkpoint.path}/{DRIVER}")
    if loop.data != driver.source.digest:
        raise ConfigError(
            f"{checkpoint.path} was written with {loop.rows} training prompts that differ from this run's "
            f"{len(driver.source.rows)} in content or order, so the run cannot resume. Restore the data, or set "
            "checkpoint.resume=never with another run.name"
        )
    for name, role in roles.trained().items():
        facts, where = checkpoint.facts(name), f"{checkpoint.path}/{name}/{FACTS}"
        ranks = parsed(facts, list[RankFacts], where)
        if not ranks or ranks[0].updates < 0:
            raise ConfigError(f"{where}: expected at least one rank, with 0 updates or more")
        with _told(f"{checkpoint.path}/{name}"):
            role.load_state(checkpoint.parts(name), facts)
    with _told(f"{checkpoint.path}/{DRIVER}"):
        driver.restore(state)


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Names the file in errors from invalid content that the types of its fields do not rule out."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        if is_the_users(error):
            raise
        raise ConfigError(f"{where} does not hold what tandem writes: {type(error).__name__}: {error}") from error


class Saver:
    """Saves the run after the steps that are due.

    Args:
        path: of the model whose configuration and tokenizer are saved with the weights. score: the metric that ranks
            checkpoints.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, driver: Driver, path: str, score: str | None) -> None:
        self.config, self.checkpoints, self.driver, self.path, self.score = config, checkpoints, driver, path, score
        self.saved = driver.number  # step of the newest checkpoint that this run has written or resumed from
        self._batch: TrainBatch | None = None  # of the last step

    def after(self, step: int, metrics: Metrics, batch: TrainBatch) -> None:
        """Saves if the step is due or the last; `batch` is the batch of the step.

        Raises:
            CheckpointError: the checkpoint could not be written. TrainingError: the weights give non-finite numbers.
        """
        self._batch, every = batch, self.config.checkpoint.every
        if self.driver.is_done or (every and step % every == 0):
            self._save(metrics.get(self.score) if self.score else None)

    def rescue(self, recorded: int) -> str | None:
        """Saves the last finished step if the weights still belong to it, it is the last recorded step, and it is not saved
        yet; returns the path.

        Raises:
            CheckpointError, TrainingError: as `after`.
        """
        state = self.driver.settled
        if state is None or state["step"] in (0, self.saved) or state["step"] != recorded:
            return None
        self.driver.residency.saving()
        return self._save(None)

    def distrust(self, why: str) -> str | None:
        """Marks the checkpoint that the failed step began with as suspect, if there is one; returns its path.

        If the step itself finished, its starting weights were sound, and nothing is marked.
        """
        settled = self.driver.settled
        if settled is not None and settled["step"] == self.driver.number:
            return None
        return self.checkpoints.distrust(self.driver.number - 1, why)

    def _save(self, score: float | None) -> str:
        state = self.driver.settled
        assert state is not None, "weights are saved only when they do not change"
        with self.driver.spans.span("checkpoint"):
            if self._batch is not None:
                self.driver.residency.training()
                self._check(self._batch, state["step"])
            path = self.checkpoints.save(
                state["step"], state, self.driver.roles.trained(), self._save_model, flat(self.config), score
            )
        self.saved = state["step"]
        return path

    def _check(self, batch: TrainBatch, step: int) -> None:
        """Tests the weights on a batch, to refuse weights that would make the next step fail.

        Raises:
            TrainingError: log-probs or values are not finite.
        """
        roles, rollout = self.driver.roles, batch.rollout
        tried = {"the policy's log-probs": roles.actor.logprobs(rollout)}
        if roles.critic is not None:
            tried["the critic's values"] = roles.critic.values(rollout).values
        for what, numbers in tried.items():
            if not bool(numbers[batch.mask].isfinite().all()):  # prompts may contain tokens that the model excludes
                raise TrainingError(
                    f"after the update of step {step} {what} are not finite, so no checkpoint of it is written. Lower "
                    f"actor.lr (now {self.config.actor.lr:g}) or critic.lr (now {self.config.critic.lr:g}), and start the "
                    "run again: it resumes from the previous checkpoint, if there is one"
                )

    def _save_model(self, folder: Path) -> None:
        save_description(self.path, folder)


def _is_among(key: str, names: tuple[str, ...]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)
