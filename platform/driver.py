"""The loop: one driver for every algorithm. It asks the algorithm's record for what it needs, never for its name.

    prompts -> generate -> score -> infer -> credit -> update -> publish

Read `Driver.step` first; every line of it is a phase.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.platform import metrics as measure
from tandem.platform.algorithms import Algorithm
from tandem.platform.batch import Inferred, Rollout, RolloutBatch, Score, TrainBatch
from tandem.platform.config import Config
from tandem.platform.credit import credit, minibatches
from tandem.platform.evaluate import Evaluation
from tandem.platform.metrics import Metrics
from tandem.platform.protocols import Roles, Sampling
from tandem.platform.seeds import mix
from tandem.platform.source import PromptSource
from tandem.platform.spans import Spans

TRAINING_STREAM, UPDATE_STREAM = 0, 1  # what a random number is for; part of its seed


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: its metrics, and its samples with their credit."""

    metrics: Metrics
    rollouts: Sequence[Rollout]
    scores: Sequence[Score]
    batch: TrainBatch
    finished_at: float  # seconds since the epoch, before any evaluation


class Driver:
    """Trains for `steps` steps.

    `on_step(step, result)` is called after each, evaluation included; step 0, if evaluated, comes as `on_eval(metrics)`.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        roles: Roles,
        source: PromptSource,
        steps: int,
        evaluation: Evaluation | None = None,
        spans: Spans | None = None,
        on_step: Callable[[int, StepResult], None] = lambda step, result: None,
        on_eval: Callable[[Metrics], None] = lambda metrics: None,
    ) -> None:
        assert algorithm.needs_critic == (roles.critic is not None), "the critic follows from the algorithm alone"
        self.config, self.algorithm, self.roles, self.source, self.steps = config, algorithm, roles, source, steps
        self.evaluation, self.spans = evaluation, spans or Spans()
        self.on_step, self.on_eval = on_step, on_eval
        self.number = 0  # of the step that runs
        self.version = 0  # of the policy: updates it has had
        self._pending: deque[Any] = deque()  # tickets of steps being generated, oldest first
        self._submitted = 0  # number of the last step that was submitted

    def run(self) -> None:
        """The whole training, with the evaluations around and inside it."""
        self._publish()
        if self.config.eval.before_training:
            self.on_eval(self._evaluate())
        while self.number < self.steps:
            result = self.step()
            every = self.config.eval.every
            if self.number == self.steps or (every and self.number % every == 0):
                result = replace(result, metrics={**result.metrics, **self._evaluate()})
            self.on_step(self.number, result)

    def step(self) -> StepResult:
        """One training step."""
        self.number += 1
        with self.spans.span("step"):
            with self.spans.span("generate"):
                rollouts = self._generate()
            with self.spans.span("score"):
                scores = self.roles.rewards.score(rollouts)
                batch = RolloutBatch.from_rollouts(rollouts, scores)
            with self.spans.span("infer"):
                inferred = self._infer(batch)
            with self.spans.span("credit"):
                train_batch = credit(batch, inferred, self.algorithm, self.config.algo)
            with self.spans.span("update"):
                updated = self._update(train_batch)
            with self.spans.span("publish"):
                lag = measure.policy_lag_metrics(train_batch, self.version)
                self._advance()
        metrics = {**self._describe(rollouts, scores, train_batch), **updated, **lag}
        return StepResult(metrics, rollouts, scores, train_batch, time.time())

    def _generate(self) -> list[Rollout]:
        """Collects this step's samples, with up to `max_staleness` later steps submitted behind them."""
        ahead = min(self.number + self.config.rollout.max_staleness, self.steps)
        while self._submitted < max(ahead, self.number):
            self._submitted += 1
            prompts = self.source.prompts_of_step(self._submitted)
            self._pending.append(self.roles.rollouts.submit(prompts, self._sampling(self._submitted)))
        return self.roles.rollouts.collect(self._pending.popleft())

    def _sampling(self, step: int) -> Sampling:
        rollout = self.config.rollout
        return Sampling(
            samples=rollout.samples_per_prompt,
            temperature=rollout.temperature,
            max_tokens=rollout.max_response_tokens,
            seed=(self._seed(rollout.seed), TRAINING_STREAM, step),
        )

    def _seed(self, own: int | None) -> int:
        return self.config.run.seed if own is None else own

    def _infer(self, batch: RolloutBatch) -> Inferred:
        with self.spans.span("infer_old"):
            old = self.roles.actor.logprobs(batch)
        ref = values = None
        if self.roles.reference is not None:
            with self.spans.span("infer_reference"):
                ref = self.roles.reference.logprobs(batch)
        if self.roles.critic is not None:
            with self.spans.span("infer_values"):
                values = self.roles.critic.values(batch)
        return Inferred(old, ref, values)

    def _update(self, batch: TrainBatch) -> Metrics:
        """Critic, then actor, over the same mini-batches."""
        seed = mix(self._seed(None), UPDATE_STREAM, self.number)
        parts = list(minibatches(batch, self.config.train, seed))
        totals = []
        if self.roles.critic is not None:
            with self.spans.span("update_critic"):
                totals.append(self.roles.critic.update(parts))
        if self._policy_learns:
            with self.spans.span("update_actor"):
                totals.append(self.roles.actor.update(parts))
        return measure.reduce_totals(totals)

    @property
    def _policy_learns(self) -> bool:
        return self.roles.critic is None or self.number > self.config.critic.warmup_steps

    def _advance(self) -> None:
        if self._policy_learns:
            self.version += 1
            self._publish()

    def _publish(self) -> None:
        for bucket in self.roles.actor.weight_buckets():
            self.roles.rollouts.load_weights(bucket)
        self.roles.rollouts.finish_weights(self.version, self.roles.actor.weight_checksums())

    def _evaluate(self) -> Metrics:
        if self.evaluation is None:
            return {}
        with self.spans.span("evaluate"):
            metrics = self.evaluation.run(self.roles, self._seed(self.config.rollout.seed), self.number)
        return {**metrics, **self.spans.take()}

    def _describe(self, rollouts: Sequence[Rollout], scores: Sequence[Score], batch: TrainBatch) -> Metrics:
        times = self.spans.take()
        described = {
            "step": float(self.number),
            "policy/version": float(self.version),
            **measure.reward_metrics(scores),
            **measure.rollout_metrics(rollouts, batch.rollout),
            **measure.credit_metrics(batch),
            **measure.memory_metrics(self._memory()),
            **times,
        }
        described["tokens/response_per_s"] = described["tokens/response"] / times["time/step_s"]
        algo = self.config.algo
        if self.roles.reference is not None:
            described["kl/coef"] = algo.kl_reward_coef or algo.kl_loss_coef
        return described

    def _memory(self) -> Mapping[str, Mapping[str, int]]:
        return {name: role.memory() for name, role in self.roles.named().items()}
