"""The loop: one driver for every algorithm. The driver reads the algorithm's record, never its name.

    prompts -> generate -> score -> infer -> credit -> update -> publish

Read `Driver.step` first: it lists the phases in order. `Collector.collect` is the first two phases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from tandem.platform.algorithms.credit import credit, epochs, halves
from tandem.platform.algorithms.kl import KLController
from tandem.platform.algorithms.registry import Algorithm
from tandem.platform.config.schema import Config
from tandem.platform.data.prompt_source import PromptSource
from tandem.platform.experience.batch import Inferred, RolloutBatch, TrainBatch
from tandem.platform.experience.metrics import Metrics
from tandem.platform.loop import metrics as measure
from tandem.platform.loop.checksum import combined
from tandem.platform.loop.collector import Collected, Collector
from tandem.platform.loop.evaluate import Evaluation
from tandem.platform.loop.group import rollouts_of, scores_of
from tandem.platform.loop.protocols import Roles, Totals
from tandem.platform.loop.residency import Residency
from tandem.platform.loop.seeds import mix
from tandem.platform.loop.spans import Spans

UPDATE_STREAM = 1  # part of the seed: separates the order of updates from other random numbers


@dataclass(frozen=True)
class StepResult:
    """The result of a step: its metrics, and its samples with their advantages."""

    metrics: Metrics
    collected: Collected
    batch: TrainBatch
    unmoved: frozenset[str]  # trainable tensors that the step's updates have not changed
    finished_at: float  # seconds since the epoch, before any evaluation


class Driver:
    """Trains for `steps` steps, or fewer if `run.epochs` passes over the data take fewer.

    `on_step(step, result)` is called after each step and its evaluation, even if the evaluation fails. `on_eval(metrics)`
    receives the evaluation before the first step; the metrics include the step number.
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        roles: Roles,
        source: PromptSource,
        steps: int,
        evaluations: Sequence[Evaluation] = (),
        spans: Spans | None = None,
        on_step: Callable[[int, StepResult], None] = lambda step, result: None,
        on_eval: Callable[[Metrics], None] = lambda metrics: None,
    ) -> None:
        assert algorithm.needs_critic == (roles.critic is not None), "the critic follows from the algorithm alone"
        self.config, self.algorithm, self.roles, self.source, self.steps = config, algorithm, roles, source, steps
        self.evaluations, self.spans = evaluations, spans or Spans()
        self.on_step, self.on_eval = on_step, on_eval
        self.number = 0  # of the current step
        self.settled: dict[str, Any] | None = None  # the state that matches the current weights; None during an update
        self.first_weights = ""  # digest of the weights that `run` began with
        self.version = 0  # of the policy: number of its updates
        self.residency = Residency(roles)
        self.collector = Collector(config, algorithm, roles, source, steps, self.spans, self.residency)
        self.kl_controller = KLController(config.algo.kl_reward_coef, config.algo.kl_target, config.algo.kl_horizon)
        self.critic_ready = roles.critic is None or config.critic.warmup_steps == 0  # if True, the policy learns

    def state(self) -> dict[str, Any]:
        """The state of the loop after a step, as JSON values. The states of the roles are saved separately."""
        return {
            "step": self.number,
            "version": self.version,
            "critic_ready": self.critic_ready,
            "kl_coef": self.kl_controller.coef,
            "rows": len(self.source.rows),
            "data": self.source.digest,
            **self.collector.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`; call it before `run`."""
        self.number, self.version, self.critic_ready = state["step"], state["version"], state["critic_ready"]
        if self.config.algo.kl_target is not None and state["kl_coef"] > 0:  # else the settings determine it
            self.kl_controller.coef = state["kl_coef"]
        self.collector.restore(state)

    def run(self) -> None:
        """Runs the whole training, including evaluations."""
        if self.number > 0 and self.is_done:
            return
        self.settled = self.state()
        self.first_weights = combined(self._publish(verify=True))
        if self.config.eval.before_training:
            self.on_eval({"step": float(self.number), **self._evaluate()})
        while not self.is_done:
            result = self.step()
            try:
                every = self.config.eval.every
                if self.is_done or (every and self.number % every == 0):
                    result = replace(result, metrics={**result.metrics, **self._evaluate()})
            finally:  # record a completed step even if its evaluation fails
                self.spans.mark("record")
                self.on_step(self.number, result)

    @property
    def is_done(self) -> bool:
        """Whether the last step is complete."""
        return self.number >= self.steps or self.collector.is_exhausted

    def step(self) -> StepResult:
        """Runs one training step."""
        self.number += 1
        with self.spans.span("step"):
            collected = self.collector.collect(self.number)
            with self.spans.span("infer"):
                inferred = self._infer(collected.batch)
            with self.spans.span("credit"):
                batch, credited = credit(
                    collected.batch, inferred, self.algorithm, self.config.algo, self.kl_controller.coef
                )
                described = {**credited, **measure.credit_metrics(batch)}
            self.settled = None
            with self.spans.span("update"):
                updated, unmoved = self._update(batch, described)
            with self.spans.span("publish"):
                lag = measure.policy_lag_metrics(collected.batch, inferred.old_logprobs, self.version)
                self._advance(described)
        self.settled = self.state()
        metrics = {**self._describe(collected, batch), **described, **updated, **lag}
        return StepResult(metrics, collected, batch, unmoved, time.time())

    def _infer(self, batch: RolloutBatch) -> Inferred:
        self.residency.training()
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

    def _update(self, batch: TrainBatch, described: Metrics) -> tuple[Metrics, frozenset[str]]:
        """Updates critic, then actor, on the same mini-batches, of which the critic may take more epochs. Returns metrics
        and the unmoved trainable tensors.
        """
        train, seed = self.config.train, mix(self.config.run.seed, UPDATE_STREAM, self.number)
        most = max(train.epochs_per_batch, self.config.critic_epochs if self.roles.critic else 0)
        parts = list(epochs(batch, most, train.minibatches, seed))
        totals = self._gradient_noise(batch)
        if self.roles.critic is not None:
            with self.spans.span("update_critic"):
                totals.append(self.roles.critic.update(list(chain.from_iterable(parts[: self.config.critic_epochs]))))
        self.critic_ready = self.critic_ready or self._critic_suffices(described)
        if self.critic_ready:
            with self.spans.span("update_actor"):
                totals.append(self._update_actor(parts[: train.epochs_per_batch]))
        unmoved = frozenset[str]().union(*(part.unmoved or () for part in totals))
        return {**measure.reduce_totals(totals), "update/unmoved_tensors": float(len(unmoved))}, unmoved

    def _gradient_noise(self, batch: TrainBatch) -> list[Totals]:
        """Measures gradient noise if this step is due for it and both halves of the batch have tokens."""
        every = self.config.train.gradient_noise_every
        parts = halves(batch) if every and self.number % every == 0 else []
        if not parts or not all(part.num_tokens for part in parts):
            return []
        with self.spans.span("gradient_noise"):
            return [self.roles.actor.gradient_noise(parts)]

    def _critic_suffices(self, described: Metrics) -> bool:
        """Whether the critic's warm-up is over: all its steps are done, or its explained variance is high enough."""
        critic = self.config.critic
        enough = critic.warmup_until is not None and described["critic/explained_variance"] >= critic.warmup_until
        return enough or self.number > critic.warmup_steps

    def _update_actor(self, parts: list[list[TrainBatch]]) -> Totals:
        """Updates epoch by epoch, until the policy has moved further than `algo.kl_stop`."""
        totals: list[Totals] = []
        for epoch in parts:
            totals.append(self.roles.actor.update(epoch))
            moved = measure.reduce_totals(totals[-1:]).get("policy/approx_kl", 0.0)
            if self.config.algo.kl_stop is not None and moved > self.config.algo.kl_stop:
                break
        done = Totals({"policy/epochs": (float(len(totals)), 1.0)}, {})
        return measure.add_totals([*totals, done])

    def _advance(self, described: Metrics) -> None:
        """Prepares the next step: adapts the KL coefficient and publishes the new policy."""
        if self.critic_ready:  # while the policy is frozen, its KL says nothing about the coefficient
            if "kl/sampled" in described:
                self.kl_controller.observe(described["kl/sampled"], self.config.samples_per_step)
            self.version += 1
            self._publish(verify=self.version % self.config.trainer.checksum_every == 0)

    def _publish(self, verify: bool) -> Mapping[str, int]:
        """Sends the weights to the rollout engines. Returns their checksums, if `verify`."""
        self.residency.syncing()
        self.roles.rollouts.begin_weights()
        for bucket in self.roles.actor.weight_buckets(verify):
            self.roles.rollouts.load_weights(bucket)
        checksums = self.roles.actor.weight_checksums()
        self.roles.rollouts.finish_weights(self.version, checksums)
        return checksums

    def _evaluate(self) -> Metrics:
        if not self.evaluations:
            return {}
        with self.spans.span("evaluate"):
            self.residency.sampling()
            metrics: Metrics = {}
            for evaluation in self.evaluations:
                metrics |= evaluation.run(self.roles, self.config.sampling_seed, self.number)
        return {**metrics, **self.spans.take()}

    def _describe(self, collected: Collected, batch: TrainBatch) -> Metrics:
        times = self.spans.take()
        described = {
            "step": float(self.number),
            "data/epoch": self.collector.taken * self.config.prompts_per_step / len(self.source.rows),
            "policy/version": float(self.version),
            **measure.reward_metrics(scores_of(collected.sampled)),
            **measure.rollout_metrics(rollouts_of(collected.sampled)),
            **measure.sample_metrics(collected, batch.mask),
            **measure.memory_metrics(self._memory()),
            "restarts/rollout": float(self.roles.rollouts.restarts),
            "restarts/reward": float(self.roles.rewards.restarts),
            **times,
        }
        described["tokens/response_per_s"] = described["tokens/response"] / times["time/step_s"]
        return described

    def _memory(self) -> Mapping[str, Mapping[str, int]]:
        return {name: role.memory() for name, role in self.roles.named().items()}
