"""Fake roles that record their calls, and a driver over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from unit_batches import make_rollout

from tandem.platform.algorithms.registry import resolve
from tandem.platform.config.schema import Config
from tandem.platform.data.prompt_source import PromptSource
from tandem.platform.data.prompts import EncodedRow
from tandem.platform.data.rows import DataOrder, Row
from tandem.platform.experience.batch import Prompt, Rollout, RolloutBatch, Score, TrainBatch, Values
from tandem.platform.loop.driver import Driver, StepResult
from tandem.platform.loop.evaluate import Evaluation
from tandem.platform.loop.protocols import Roles, Sampling, Totals
from tandem.platform.loop.spans import Spans


@dataclass
class Log:
    """The events of a run, in order."""

    events: list[str] = field(default_factory=list)

    def names(self, *wanted: str) -> list[str]:
        return [event for event in self.events if event.split()[0] in wanted]


class FakeActor:
    def __init__(self, log: Log, name: str = "actor") -> None:
        self.log, self.name = log, name
        self.minibatches: list[list[TrainBatch]] = []

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        self.log.events.append(f"{self.name}.logprobs")
        return torch.full(batch.tokens.shape, -0.5)

    def values(self, batch: RolloutBatch) -> Values:
        self.log.events.append(f"{self.name}.values")
        return Values(torch.zeros(batch.tokens.shape), torch.zeros(len(batch)))

    def update(self, minibatches: Sequence[TrainBatch]) -> Totals:
        self.log.events.append(f"{self.name}.update")
        self.minibatches.append(list(minibatches))
        return Totals({f"{self.name}/loss": (3.0, 2.0)}, {f"{self.name}/ratio_max": 1.0})

    def weight_buckets(self, verify: bool = True) -> Iterator[Any]:
        yield from ("first", "second")

    def weight_checksums(self) -> dict[str, int]:
        return {"w": 7}

    def memory(self) -> dict[str, int]:
        return {"weights": 10, "peak": 20}


class FakeRewards:
    def __init__(self, log: Log) -> None:
        self.log = log

    restarts = 0

    def submit(self, rollouts: Sequence[Rollout]) -> Any:
        return list(rollouts)

    def collect(self, ticket: Any) -> list[Score]:
        return self.verify(ticket)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.log.events.append(f"score {len(rollouts)}")
        return [Score(float(n % 2)) for n in range(len(rollouts))]

    def memory(self) -> dict[str, int]:
        return {}


class FakeRollouts:
    """Samples two tokens per response, with the weight version at the time of submission."""

    def __init__(self, log: Log) -> None:
        self.log, self.version = log, -1
        self.sampled: list[tuple[list[int], Sampling]] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        kind = "eval" if sampling.temperature == 0 else "train"
        self.log.events.append(f"submit {kind} {sampling.seed[-1]}")
        self.sampled.append(([prompt.group_id for prompt in prompts], sampling))
        rollouts = [
            make_rollout(prompt.ids, group=prompt.group_id, version=self.version)
            for prompt in prompts
            for _ in range(sampling.samples)
        ]
        return rollouts, sampling.samples

    restarts = 0

    def finished(self, ticket: Any) -> Iterator[tuple[int, list[Rollout]]]:
        self.log.events.append("collect")
        rollouts, samples = ticket
        yield from enumerate(rollouts[start : start + samples] for start in range(0, len(rollouts), samples))

    def collect(self, ticket: Any) -> list[Rollout]:
        self.log.events.append("collect")
        return list(ticket[0])

    def begin_weights(self) -> None: ...

    def load_weights(self, bucket: Any) -> None:
        self.log.events.append(f"load {bucket}")

    def finish_weights(self, version: int, checksums: Mapping[str, int]) -> None:
        assert checksums == {"w": 7}
        self.version = version
        self.log.events.append(f"publish {version}")

    def memory(self) -> dict[str, int]:
        return {"peak": 5}


@dataclass
class Run:
    """A driver with fake roles, and the results of its run."""

    config: Config
    log: Log
    driver: Driver
    rollouts: FakeRollouts
    actor: FakeActor
    critic: FakeActor | None
    steps: list[tuple[int, StepResult]]
    evals: list[dict[str, float]]
    phases: list[str]


def make(estimator: str = "gae", steps: int = 2, kl: float = 0.0, evaluate: bool = False, **changes: Any) -> Run:
    """Runs `steps` steps with 2 prompts of 2 samples; `changes` sets staleness, warmup, every, epochs or minibatches."""
    config = Config(adv_estimator=estimator)
    config.data.prompts_per_step = config.rollout.samples_per_prompt = 2
    config.algo.kl_loss_coef, config.algo.kl_reward_coef = kl, changes.get("kl_reward", 0.0)
    config.algo.kl_target, config.algo.kl_horizon = changes.get("kl_target"), 8
    config.rollout.max_staleness = changes.get("staleness", 0)
    config.critic.warmup_steps = changes.get("warmup", 0)
    config.eval.every, config.eval.before_training = changes.get("every", 0), bool(changes.get("before", 1))
    config.train.epochs_per_batch, config.train.minibatches = changes.get("epochs", 1), changes.get("minibatches", 1)
    config.critic.epochs_per_batch = changes.get("critic_epochs")
    config.run.seed = changes.get("seed", 0)
    algorithm = resolve("any", estimator, "clipped_surrogate")
    log = Log()
    actor, rollouts = FakeActor(log), FakeRollouts(log)
    critic = FakeActor(log, "critic") if algorithm.needs_critic else None
    reference = FakeActor(log, "reference") if config.needs_reference else None
    rows = [EncodedRow(Row("p"), (3, 4), "p") for _ in range(10)]
    source = PromptSource(rows, DataOrder(10, 2, seed=0))
    held_out = [Evaluation("held", [Prompt((3,), 0, "p")], 4, 0, 1.0)] if evaluate else []
    found: list[tuple[int, StepResult]] = []
    evals: list[dict[str, float]] = []
    phases: list[str] = []
    driver = Driver(
        config,
        algorithm,
        Roles(actor, FakeRewards(log), rollouts, critic, reference),
        source,
        steps,
        held_out,
        Spans(phases.append),
        on_step=lambda step, result: found.append((step, result)),
        on_eval=evals.append,
    )
    return Run(config, log, driver, rollouts, actor, critic, found, evals, phases)
