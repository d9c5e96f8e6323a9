"""Reward shaping, between the reward functions and the advantages. Every step is off by default.

reward -> running normalisation -> scale -> clip -> + overlong penalty
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tandem.platform.config.schema import RewardConfig
from tandem.platform.experience.batch import Rollout, Score
from tandem.platform.experience.masked import EPS

OVERLONG = "overlong_penalty"
"""Name of the penalty among the parts of a score, logged as `reward/overlong_penalty`."""


def overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """Soft penalty of a long response, in [-1, 0].

        0                                   up to max - buffer tokens
        ((max - buffer) - tokens) / buffer  up to max
        -1                                  beyond

    With a buffer of 0, this is a step after `max_tokens`. Yu et al., DAPO, eq. 13, https://arxiv.org/abs/2503.14476

    Args:
        tokens: number of response tokens, including the end token.
    """
    assert 0 <= buffer <= max_tokens, f"a buffer of {buffer} tokens does not fit into {max_tokens}"
    over = tokens - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if buffer == 0 else -min(over / buffer, 1.0)


def overlong_buffer(config: RewardConfig, max_tokens: int) -> int:
    """`reward.overlong_buffer_tokens`; default: a fifth of the longest response (4096 of 20480 in DAPO)."""
    return max_tokens // 5 if config.overlong_buffer_tokens is None else config.overlong_buffer_tokens


class RunningMoments:
    """Mean and population standard deviation of all numbers seen so far, merged batch by batch.

    Chan et al., Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: Sequence[float]) -> None:
        """Adds numbers."""
        if not values:
            return
        count, mean = len(values), math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, gap = self.count + count, mean - self.mean
        self._squares += squares + gap * gap * self.count * count / total
        self.mean += gap * count / total
        self.count = total

    @property
    def state(self) -> list[float]:
        """The full state, to be saved and restored."""
        return [self.count, self.mean, self._squares]

    @state.setter
    def state(self, state: list[float]) -> None:
        self.count, self.mean, self._squares = int(state[0]), state[1], state[2]

    @property
    def std(self) -> float:
        """The population standard deviation; 0 before the first number."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class RewardShaper:
    """Shapes rewards according to the settings `reward.*`. Its only state is the running moments."""

    def __init__(self, config: RewardConfig, max_tokens: int) -> None:
        self._config, self._max_tokens = config, max_tokens
        self._buffer = overlong_buffer(config, max_tokens)
        bounded = config.clip is not None or config.overlong_penalty > 0
        self._is_on = bounded or config.normalize != "none" or config.scale != 1
        self.moments = RunningMoments()

    def observe(self, scores: Sequence[Score]) -> None:
        """Adds the rewards of sampled responses to the running moments."""
        if self._config.normalize != "none":
            self.moments.add([score.reward for score in scores if score.reward is not None])

    def shape(self, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Score]:
        """The scores with shaped rewards; `raw` keeps the unshaped reward. Unscored samples stay unscored.

        If all shaping is off, returns the scores unchanged.
        """
        if not self._is_on:
            return list(scores)
        return [self._shape(rollout, score) for rollout, score in zip(rollouts, scores, strict=True)]

    def _shape(self, rollout: Rollout, score: Score) -> Score:
        if score.reward is None:
            return score
        config = self._config
        reward, parts = score.reward * self._slope + self._offset, score.parts
        steps = {token: value * self._slope for token, value in score.steps.items()}
        if config.clip is not None:
            reward = min(max(reward, -config.clip), config.clip)
            steps = {token: min(max(value, -config.clip), config.clip) for token, value in steps.items()}
        if config.overlong_penalty > 0:
            tokens = len(rollout.response_ids)
            penalty = config.overlong_penalty * overlong_penalty(tokens, self._max_tokens, self._buffer)
            reward, parts = reward + penalty, {**parts, OVERLONG: penalty}
        return replace(score, reward=reward, parts=parts, steps=steps, raw=score.reward)

    @property
    def _slope(self) -> float:
        """The factor of a reward. While rewards have not varied yet, it is `scale` without normalisation."""
        varied = self._config.normalize != "none" and self.moments.std > EPS
        return self._config.scale / (self.moments.std + EPS if varied else 1.0)

    @property
    def _offset(self) -> float:
        return -self.moments.mean * self._slope if self._config.normalize == "mean_std" else 0.0
