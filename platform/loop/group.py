"""The samples of one prompt, and their JSON form: dynamic sampling can keep groups for the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.platform.data.prompt_source import PromptSource
from tandem.platform.experience.batch import Prompt, Rollout, Score, StopReason


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, scored."""

    rollouts: Sequence[Rollout]
    scores: Sequence[Score]
    baseline: float | None = None  # reward of the greedy response, if the algorithm needs it
    greedy_tokens: int = 0  # tokens of the greedy response

    def varies(self, metric: str) -> bool:
        """Whether the samples differ in `metric`: "reward", or "accuracy" (the reward before shaping)."""
        values = [
            score.accuracy if metric == "accuracy" else score.reward for score in self.scores if score.reward is not None
        ]
        return len(set(values)) > 1


def rollouts_of(groups: Sequence[Group]) -> list[Rollout]:
    """The samples of the groups, in order."""
    return [rollout for group in groups for rollout in group.rollouts]


def scores_of(groups: Sequence[Group]) -> list[Score]:
    """The scores of the groups, in order."""
    return [score for group in groups for score in group.scores]


def samples_in(groups: Sequence[Group]) -> int:
    """The number of samples in the groups."""
    return sum(len(group.rollouts) for group in groups)


def group_to_json(group: Group) -> dict[str, Any]:
    """A group as JSON values; the prompt is replaced by its group id."""
    rollouts = [
        {name: value for name, value in vars(rollout).items() if name != "prompt"} | {"stop": rollout.stop.value}
        for rollout in group.rollouts
    ]
    return {
        "group_id": group.rollouts[0].prompt.group_id,
        "rollouts": rollouts,
        "scores": [asdict(score) for score in group.scores],
        "baseline": group.baseline,
        "greedy_tokens": group.greedy_tokens,
    }


def group_from_json(saved: Mapping[str, Any], source: PromptSource) -> Group:
    """The group of a JSON value; its prompt comes from `source`."""
    prompt = source.prompt_of_group(saved["group_id"])
    scores = [
        {**score, "steps": {int(token): value for token, value in score["steps"].items()}} for score in saved["scores"]
    ]
    return Group(
        [_rollout(prompt, rollout) for rollout in saved["rollouts"]],
        [Score(**score) for score in scores],
        saved["baseline"],
        saved["greedy_tokens"],
    )


def _rollout(prompt: Prompt, saved: Mapping[str, Any]) -> Rollout:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return Rollout(prompt=prompt, **{**fields, "stop": StopReason(saved["stop"])})
