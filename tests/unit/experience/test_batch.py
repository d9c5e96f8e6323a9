"""Padding, masks and the types of each stage."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_batches import batch_of, make_rollout, scores

from tandem.platform.experience.batch import (
    Inferred,
    Prompt,
    Rollout,
    RolloutBatch,
    Score,
    StopReason,
    TrainBatch,
    Values,
)


def test_the_example_of_the_docstring() -> None:
    rollout = make_rollout((3, 10, 4, 12), (9, 1), group=640)
    longer = make_rollout((3, 10, 4, 12), (9, 9, 1))
    batch = RolloutBatch.from_rollouts([rollout, longer], scores(1.0, 0.5))
    assert batch.tokens[0].tolist() == [3, 10, 4, 12, 9, 1, -1]
    assert batch.response_mask[0].tolist() == [False] * 4 + [True, True, False]
    assert batch.lengths.tolist() == [6, 7]
    assert batch.token_rewards.tolist() == [[0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0.5]]
    assert batch.rollout_logprobs[0].tolist() == [0, 0, 0, 0, -0.5, -0.5, 0]
    assert batch.group_ids.tolist() == [640, 0]
    assert batch.rewards.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("stop", StopReason)
def test_reward_lands_on_the_last_response_token(stop: StopReason) -> None:
    batch = RolloutBatch.from_rollouts(
        [make_rollout(response=(5, 6, 2), stop=stop), make_rollout(response=(5,) * 5, stop=StopReason.LENGTH)],
        scores(2.0, 2.0),
    )
    assert batch.token_rewards[:, 2:].tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 2]]
    assert (batch.token_rewards * batch.response_mask).sum(dim=1).tolist() == [2, 2]
    assert batch.truncated.tolist() == [stop is StopReason.LENGTH, True]


def test_reward_lands_on_the_last_token_that_the_policy_wrote() -> None:
    rollout = make_rollout(response=(5, 6, 7, 8), mask=(True, True, False, False))
    batch = RolloutBatch.from_rollouts([rollout], scores(3.0))
    assert batch.token_rewards.tolist() == [[0, 0, 0, 3, 0, 0]]
    assert batch.response_mask.tolist() == [[False, False, True, True, False, False]]


@pytest.mark.parametrize("response", [(), (5, 6)])
def test_response_without_a_written_token_gets_no_reward_anywhere(response: tuple[int, ...]) -> None:
    rollouts = [make_rollout(response=response, mask=[False] * len(response)), make_rollout(response=(5, 6, 7))]
    batch = RolloutBatch.from_rollouts(rollouts, scores(10.0, 1.0))
    assert not batch.token_rewards[0].any()
    assert not batch.response_mask[0].any()
    assert batch.scored.tolist() == [True, True]


def test_a_batch_of_empty_responses_only() -> None:
    batch = RolloutBatch.from_rollouts([make_rollout(response=())] * 2, scores(1.0, 0.0))
    assert batch.tokens.shape == (2, 2)
    assert not batch.response_mask.any()


def test_masks_come_from_lengths_when_pad_and_end_are_one_token() -> None:
    # 2 ends a turn inside the prompt, ends the response, and would pad in other frameworks.
    batch = RolloutBatch.from_rollouts(
        [make_rollout((11, 12, 2, 13), (5, 6, 2)), make_rollout((1,), (5, 6, 7, 8, 9, 9, 9, 9))], scores(1.0, 0.0)
    )
    assert batch.response_mask[0].tolist() == [False] * 4 + [True] * 3 + [False] * 2
    assert batch.lengths.tolist() == [7, 9]


def test_unscorable_sample_is_masked_out() -> None:
    batch = RolloutBatch.from_rollouts([make_rollout(), make_rollout()], scores(None, 0.0))
    assert batch.scored.tolist() == [False, True]
    assert batch.response_mask.any(dim=1).tolist() == [False, True]
    assert batch.rewards.tolist() == [0.0, 0.0]
    assert batch.tokens[0].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("reward", [math.inf, -math.inf, math.nan])
def test_score_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(AssertionError, match="score 1 is not finite"):
        RolloutBatch.from_rollouts([make_rollout(), make_rollout()], scores(0.0, reward))


def test_rollouts_and_scores_must_pair() -> None:
    with pytest.raises(AssertionError, match="1 rollouts but 2 scores"):
        RolloutBatch.from_rollouts([make_rollout()], scores(1.0, 1.0))


def test_rollout_refuses_parts_of_different_lengths() -> None:
    with pytest.raises(AssertionError, match=r"differ in length: \[1, 2\]"):
        Rollout(Prompt((1,), 0, ""), (5, 6), (True, True), (-1.0,), StopReason.STOP, 0, "")


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_a_batch_holds_its_rollouts_verbatim(shape: list[tuple[int, int]]) -> None:
    rollouts = [make_rollout(range(1, p + 1), range(10, 10 + r), group=n) for n, (p, r) in enumerate(shape)]
    batch = RolloutBatch.from_rollouts(rollouts, [Score(1.0)] * len(rollouts))
    for row, rollout in enumerate(rollouts):
        length = int(batch.lengths[row])
        assert tuple(batch.tokens[row, :length].tolist()) == rollout.prompt.ids + rollout.response_ids
        assert (batch.tokens[row, length:] == -1).all()
        assert int(batch.response_mask[row].sum()) == len(rollout.response_ids)
        assert batch.token_rewards[row].sum() == float(bool(rollout.response_ids))


def small() -> RolloutBatch:
    rollouts = [make_rollout(response=[5] * n, group=n) for n in (1, 4, 2)]
    return RolloutBatch.from_rollouts(rollouts, scores(1.0, 2.0, 3.0))


def test_select_takes_rows_in_the_given_order() -> None:
    picked = small().select([2, 0])
    assert picked.group_ids.tolist() == [2, 1]
    assert picked.rewards.tolist() == [3, 1]
    assert picked.tokens.shape == (2, 6)
    assert len(picked) == 2


def test_split_and_trim() -> None:
    first, second = small().split([[0, 2], [1]])
    assert first.trim().tokens.tolist() == [[3, 4, 5, -1], [3, 4, 5, 5]]
    assert first.trim().token_rewards.shape == (2, 4)
    assert second.trim().tokens.shape == (1, 6)


def test_train_batch_operations_follow_nested_rows() -> None:
    numbers = torch.arange(18.0).reshape(3, 6)
    batch = TrainBatch(small(), numbers, numbers + 1, None, numbers + 2, numbers + 3, num_tokens=70, num_sequences=9)
    part = batch.select([2]).trim()
    assert part.rollout.group_ids.tolist() == [2]
    assert part.old_logprobs.tolist() == [[12, 13, 14, 15]]
    assert part.returns is not None
    assert part.returns.tolist() == [[15, 16, 17, 18]]
    assert part.ref_logprobs is None
    assert (part.num_tokens, part.num_sequences) == (70, 9)  # global values, which selecting rows does not change


def test_mini_batch_counts_its_own_tokens() -> None:
    batch = TrainBatch(small(), torch.zeros(3, 6), torch.zeros(3, 6)).select([0, 1]).as_minibatch()
    assert (batch.num_tokens, batch.num_sequences) == (5, 2)


def test_blank_counts_for_nothing() -> None:
    batch = TrainBatch(small(), torch.zeros(3, 6), torch.zeros(3, 6)).as_minibatch()
    blank = batch.blank()
    assert len(blank) == 1
    assert not blank.mask.any()
    assert blank.num_tokens == batch.num_tokens == 7
    assert batch.mask.any(dim=1).all()


def test_shapes_and_types_are_checked_once_and_named() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    batch = batch_of(mask)
    with pytest.raises(AssertionError, match=r"RolloutBatch.lengths has shape \(3,\), expected \(2,\)"):
        replace(batch, lengths=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(AssertionError, match=r"RolloutBatch.rewards has dtype torch.float64"):
        replace(batch, rewards=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match=r"RolloutBatch.response_mask has dtype torch.int64"):
        replace(batch, response_mask=mask.long())
    with pytest.raises(AssertionError, match=r"Inferred.ref_logprobs has shape \(2, 2\)"):
        Inferred(torch.zeros(2, 3), torch.zeros(2, 2))
    with pytest.raises(AssertionError, match=r"Values.final has shape \(1,\)"):
        Values(torch.zeros(2, 3), torch.zeros(1))
    with pytest.raises(AssertionError, match=r"TrainBatch.advantages has shape \(2, 4\)"):
        TrainBatch(batch, torch.zeros(2, 3), torch.zeros(2, 4))


def test_types_are_frozen_and_cross_processes() -> None:
    batch = small()
    with pytest.raises(FrozenInstanceError):
        batch.tokens = torch.zeros(1)  # type: ignore[misc]
    back = pickle.loads(pickle.dumps(batch))
    assert torch.equal(back.tokens, batch.tokens)
    rollout = make_rollout()
    assert pickle.loads(pickle.dumps(rollout)) == rollout


def test_stop_reasons() -> None:
    assert [reason.is_truncated for reason in StopReason] == [False, True]
    assert str(StopReason.LENGTH) == "length"
