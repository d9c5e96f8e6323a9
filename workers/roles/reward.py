"""The reward role: the weighted sum of reward functions and a reward model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tandem.platform.config.schema import ConfigError, RewardConfig
from tandem.platform.experience.batch import Rollout, Score
from tandem.platform.rewards.functions import Outcome, RewardError, Sample, part_name
from tandem.platform.system.text import shorten
from tandem.workers.cluster.runtime import Rank, peak_memory_bytes, pick_device, show_stacks_on_request, use_threads
from tandem.workers.isolation.reward_pool import RewardPool

if TYPE_CHECKING:
    from tandem.workers.models.reward_model import RewardModel

LARGEST = float(torch.finfo(torch.float32).max)
MODEL = "model"  # the reward model's part of a score


@dataclass(frozen=True)
class RewardSpec:
    """The settings of a rank of the reward role."""

    config: RewardConfig
    policy_path: str | None = None  # folder or hub name; a reward model with its tokenizer reads samples as token ids
    trust_remote_code: bool = False  # of the policy's tokenizer
    verifier: str | None = None  # of held-out accuracy, as set in `eval.function`


class RewardWorker:
    """Scores rollouts; safe to call from several threads at once."""

    def __init__(self, spec: RewardSpec | RewardConfig, *, device: str = "cpu", threads: int | None = None) -> None:
        """Starts the functions' processes and loads the model; ConfigError if any of them cannot work.

        A bare `RewardConfig` does not name the policy, so a reward model then reads texts. `device` and `threads` (torch's)
        apply to the reward model.
        """
        spec = spec if isinstance(spec, RewardSpec) else RewardSpec(spec)
        config = spec.config
        self._config, self._device = config, torch.device(device)
        self._weights = _weights(config)
        specs = [*config.functions, *([config.function] if config.function else [])]
        self._model: RewardModel | None = None
        self._reads_ids = False
        self._pool: RewardPool | None = None
        self._verifier, self._verifiers = spec.verifier, None
        if spec.verifier is not None and spec.verifier not in specs:
            if part_name(spec.verifier) in self._weights:
                raise ConfigError(
                    f"eval.function={spec.verifier}: a part of the reward has the same name, {part_name(spec.verifier)}. "
                    "Rename one of the two functions"
                )
            self._verifiers = _pool([spec.verifier], config)
        try:
            if specs:
                self._pool = _pool(specs, config)
            if config.model is None:
                return
            self._model = _load_model(config.model, device, threads)
            self._reads_ids = _shares_tokens(self._model, spec)
        except BaseException:
            self.close()
            raise

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order.

        A sample with a part that cannot be scored has reward None. RewardError if a function raised (unless
        `reward.allow_errors`) or returned something that is not a reward.
        """
        call = self._pool.submit([_sample(rollout) for rollout in rollouts]) if self._pool else None
        by_model = self._model_outcomes(rollouts)  # meanwhile the processes run the functions
        by_functions = call.wait() if call else [[] for _ in rollouts]
        scores, seen = [], Counter[int]()
        for rollout, functions, model in zip(rollouts, by_functions, by_model, strict=True):
            outcomes = dict(zip(self._weights, [*functions, *model], strict=True))
            group = rollout.prompt.group_id
            where = f"sample {seen[group]} of group {group} (prompt {shorten(rollout.prompt.text)!r})"
            scores.append(self._combine(outcomes, rollout.token_ends, where))
            seen[group] += 1
        return scores

    def verify(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """As `score`, with the verifier's outcome added to the parts; the reward is still the training reward."""
        asked = self._verifiers.submit([_sample(rollout) for rollout in rollouts]) if self._verifiers else None
        scores = self.score(rollouts)
        if asked is None or self._verifier is None:
            return scores
        name, verified = part_name(self._verifier), []
        for score, [outcome], rollout in zip(scores, asked.wait(), rollouts, strict=True):
            self._check(name, outcome, f"a response to the held-out prompt {shorten(rollout.prompt.text)!r}")
            verified.append(replace(score, parts={**score.parts, name: outcome.value}))
        return verified

    def memory(self) -> dict[str, int]:
        """Bytes of the reward model's weights, if there is a reward model, and the peak of this process."""
        memory = {"peak": peak_memory_bytes(self._device)}
        return memory if self._model is None else {"weights": self._model.weight_bytes(), **memory}

    def close(self) -> None:
        """Ends the functions' processes. May be called twice."""
        for pool in (self._pool, self._verifiers):
            if pool is not None:
                pool.close()

    def _model_outcomes(self, rollouts: Sequence[Rollout]) -> list[list[Outcome]]:
        if self._model is None:
            return [[] for _ in rollouts]
        scores = self._model.score([self._as_read(self._model, rollout) for rollout in rollouts])
        return [[_model_outcome(score)] for score in scores]

    def _as_read(self, model: RewardModel, rollout: Rollout) -> str | tuple[int, ...]:
        """Prompt and response as token ids, end token included, if the model shares the policy's tokens; else as text."""
        ids = rollout.prompt.ids + rollout.response_ids
        return ids if self._reads_ids and model.knows(ids) else rollout.prompt.text + rollout.response_text

    def _combine(self, outcomes: Mapping[str, Outcome], token_ends: Sequence[int], where: str) -> Score:
        for name, outcome in outcomes.items():
            self._check(name, outcome, where)
        parts = {name: outcome.value for name, outcome in outcomes.items()}
        problems = [outcome.problem for outcome in outcomes.values() if outcome.value is None]
        if problems:
            return Score(reward=None, parts=parts, problem=problems[0])
        reward = sum(self._weights[name] * value for name, value in parts.items() if value is not None)
        if not abs(reward) <= LARGEST:
            raise RewardError(f"the weighted reward of {where} is infinite in float32; its parts are {parts}")
        return Score(reward=reward, parts=parts, steps=self._steps(outcomes, token_ends))

    def _steps(self, outcomes: Mapping[str, Outcome], token_ends: Sequence[int]) -> dict[int, float]:
        """Weighted step rewards by the response token in which the step ends; empty without `token_ends`.

        A part of weight 0 is only a metric, so its steps give no reward.
        """
        steps: dict[int, float] = {}
        for name, weight in self._weights.items() if token_ends else ():
            for end, reward in outcomes[name].steps if weight else ():
                token = bisect_left(token_ends, end)
                steps[token] = steps.get(token, 0.0) + weight * reward
        return steps

    def _check(self, name: str, outcome: Outcome, where: str) -> None:
        if outcome.problem == "invalid":
            raise RewardError(f"{outcome.detail}; {where}")
        if outcome.problem == "error" and not self._config.allow_errors:
            hint = "fix it, or set reward.allow_errors=true to count such samples as unscorable"
            raise RewardError(f"reward function {name!r} raised on {where}: {outcome.detail}; {hint}")


def _pool(functions: Sequence[str], config: RewardConfig) -> RewardPool:
    return RewardPool(
        functions,
        processes=config.processes,
        timeout_s=config.timeout_s,
        memory_limit_mb=config.memory_limit_mb,
        retries=config.retries,
        concurrency=config.concurrency,
    )


def _weights(config: RewardConfig) -> dict[str, float]:
    """The weight of each part, in the order of the parts."""
    named = list(config.functions.items())
    if config.function:
        named.append((config.function.rpartition(":")[2], config.function_weight))
    if config.model is not None:
        named.append((MODEL, config.model_weight))
    weights = dict(named)
    if not named:
        raise ConfigError("nothing scores responses; set reward.functions, reward.function or reward.model")
    if len(weights) < len(named):
        name, _ = Counter(name for name, _ in named).most_common(1)[0]
        raise ConfigError(f"two parts of the reward are called {name!r}; rename your function, or remove the other part")
    return weights


def _load_model(path: str, device: str, threads: int | None) -> RewardModel:
    from tandem.workers.models.reward_model import RewardModel  # imports transformers, which takes seconds

    if threads is not None:
        torch.set_num_threads(threads)
    return RewardModel(path, device=device)


def _shares_tokens(model: RewardModel, spec: RewardSpec) -> bool:
    from tandem.workers.models.tokenizer import load_tokenizer

    if spec.policy_path is None:
        return False
    return model.shares(load_tokenizer(spec.policy_path, trust_remote_code=spec.trust_remote_code))


def _sample(rollout: Rollout) -> Sample:
    return Sample(
        prompt=rollout.prompt.text,
        response=rollout.response_text,
        answer=rollout.prompt.answer,
        response_tokens=len(rollout.response_ids),
        truncated=rollout.stop.is_truncated,
        metadata=rollout.prompt.metadata,
    )


def _model_outcome(score: float | None) -> Outcome:
    if score is None:
        return Outcome(None, "none")
    if math.isinf(score):
        return Outcome(None, "invalid", "the reward model gave an infinite score")
    return Outcome(None, "nan") if math.isnan(score) else Outcome(score)


class RewardRank:
    """The rank of the reward role; implements the `Rewards` protocol.

    The worker starts in `start`, not in the constructor, so a startup error reaches the caller unchanged.
    """

    def __init__(self, spec: RewardSpec | RewardConfig, rank: Rank) -> None:
        self._spec, self._rank = spec, rank
        self._worker: RewardWorker | None = None
        show_stacks_on_request()

    def start(self) -> None:
        """Starts the functions' processes and loads the model; ConfigError if any of them cannot work."""
        device = str(pick_device(self._rank.device))
        self._worker = RewardWorker(self._spec, device=device, threads=self._rank.threads)

    restarts = 0

    def submit(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores immediately; the ticket is the result."""
        return self.score(rollouts)

    def collect(self, ticket: list[Score]) -> list[Score]:
        """The scores of a ticket."""
        return ticket

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order."""
        use_threads(self._rank)
        return self._started.score(rollouts)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order, with the verifier's outcome added to its parts."""
        use_threads(self._rank)
        return self._started.verify(rollouts)

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""
        return self._started.memory()

    def close(self) -> None:
        """Ends the functions' processes, if they were started."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _started(self) -> RewardWorker:
        assert self._worker is not None, "start() comes first"
        return self._worker
