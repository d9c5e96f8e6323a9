"""How a run is saved and goes on: what belongs to it, and what may have changed since."""

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
"""Settings (or, with a dot, all below) that say what the saved state is of: which prompts come next, which model it is."""
OWN = ("run.name", "run.dir", "run.steps", "run.epochs", "checkpoint.", "tracking.", "dry_run", "cluster.")
"""Settings whose change is not worth a word."""


@dataclass(frozen=True)
class LoopState:
    """What `Driver.state` holds, as `driver.json` keeps it."""

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
    """What a rank keeps besides tensors, as `facts.json` has it."""

    updates: int
    random: dict[str, Any]


def checkpoints_of(config: Config) -> Checkpoints:
    """The checkpoints of the run: in its folder, or in a folder of its name below `checkpoint.dir`.

    Raises:
        ConfigError: a link is in the place of those in its folder.
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
        ConfigError: one that its state cannot live with; or there is a critic on one side only.
    """
    now, before = flat(config), checkpoint.settings
    different = {key: (before.get(key), value) for key, value in now.items() if before.get(key) != value}
    fixed = [key for key in different if _is_among(key, FIXED)]
    if fixed:
        was, value = different[fixed[0]]
        raise ConfigError(
            f"{checkpoint.path} was written with {fixed[0]}={was}, this run has {value}: it could not go on where it was. "
            "Set it back; or begin a new run with checkpoint.resume=never, and to keep the weights, with model.path from "
            "launch/export.py"
        )
    told = {key for key in different if not _is_among(key, OWN)}
    if any(
        optimizer.lr_schedule != "constant" and optimizer.lr_total_steps is None
        for optimizer in (config.actor, config.critic)
    ):
        told |= different.keys() & {"run.steps", "run.epochs"}  # the learning rates decay by them
    return [f"{key} {was} -> {value}" for key, (was, value) in different.items() if key in told]


def check_critic(checkpoint: Checkpoint, needs_critic: bool) -> None:
    """Refuses a checkpoint with a critic for a run without, and the other way round.

    Raises:
        ConfigError: which of the two.
    """
    if checkpoint.has("critic") != needs_critic:
        had, has = ("has a", "needs none") if checkpoint.has("critic") else ("has no", "needs one")
        raise ConfigError(f"{checkpoint.path} {had} critic, but adv_estimator {has}. Set adv_estimator as it was")


def restore(checkpoint: Checkpoint, driver: Driver, roles: Roles) -> None:
    """Puts loop and roles where the checkpoint left them.

    Raises:
        ConfigError: the data has changed, or a file holds something else. StateError: the model is another one.
        CheckpointError: a file is not what was written.
    """
    state = checkpoint.driver()
    loop = parsed(state, LoopState, f"{checkpoint.path}/{DRIVER}")
    if loop.data != driver.source.digest:
        raise ConfigError(
            f"{checkpoint.path} was written over {loop.rows} training prompts that are not the "
            f"{len(driver.source.rows)} of now, or stood in another order: it could not go on where it was. Bring the data "
            "back, or set checkpoint.resume=never with another run.name"
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
    """Tells which file holds what nobody could have written, deeper than its fields' types show."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        if is_the_users(error):
            raise
        raise ConfigError(f"{where} does not hold what tandem writes: {type(error).__name__}: {error}") from error


class Saver:
    """Saves the run after the steps that are due.

    Args:
        path: of the model whose configuration and tokenizer go with the weights. score: the metric of the best.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, driver: Driver, path: str, score: str | None) -> None:
        self.config, self.checkpoints, self.driver, self.path, self.score = config, checkpoints, driver, path, score
        self.saved = driver.number  # step of the newest checkpoint that this run has written or goes on from
        self._batch: TrainBatch | None = None  # of the last step

    def after(self, step: int, metrics: Metrics, batch: TrainBatch) -> None:
        """Saves if the step is due, or the last; `batch` is that of the step.

        Raises:
            CheckpointError: it could not be written. TrainingError: the weights are not to be trusted.
        """
        self._batch, every = batch, self.config.checkpoint.every
        if self.driver.is_done or (every and step % every == 0):
            self._save(metrics.get(self.score) if self.score else None)

    def rescue(self, recorded: int) -> str | None:
        """Saves the last step that is done, if the weights are still its own, it is the last one on record, and it is not
        saved; returns the path.

        Raises:
            CheckpointError, TrainingError: as `after`.
        """
        state = self.driver.settled
        if state is None or state["step"] in (0, self.saved) or state["step"] != recorded:
            return None
        self.driver.residency.saving()
        return self._save(None)

    def distrust(self, why: str) -> str | None:
        """Marks the checkpoint that the failed step began with, if there is one; returns its path.

        A step that is done has shown its beginning to be sound: what failed is what it made.
        """
        settled = self.driver.settled
        if settled is not None and settled["step"] == self.driver.number:
            return None
        return self.checkpoints.distrust(self.driver.number - 1, why)

    def _save(self, score: float | None) -> str:
        state = self.driver.settled
        assert state is not None, "weights are saved when they do not move"
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
        """Refuses to save weights that the next step would fail on: tries them on a batch.

        Raises:
            TrainingError: what is not finite.
        """
        roles, rollout = self.driver.roles, batch.rollout
        tried = {"the policy's log-probs": roles.actor.logprobs(rollout)}
        if roles.critic is not None:
            tried["the critic's values"] = roles.critic.values(rollout).values
        for what, numbers in tried.items():
            if not bool(numbers[batch.mask].isfinite().all()):  # a model may exclude tokens that prompts have
                raise TrainingError(
                    f"after the update of step {step} {what} are not finite, so no checkpoint of it is written. Lower "
                    f"actor.lr (now {self.config.actor.lr:g}) or critic.lr (now {self.config.critic.lr:g}), and start the "
                    "run again: it goes on from the checkpoint before, if there is one"
                )

    def _save_model(self, folder: Path) -> None:
        save_description(self.path, folder)


def _is_among(key: str, names: tuple[str, ...]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)
