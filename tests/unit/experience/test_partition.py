"""Partitions of batches over ranks and into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.platform.experience.partition import balance, microbatches

LENGTHS = st.lists(st.integers(0, 50), max_size=30)


def test_balance_by_hand() -> None:
    # Longest first: 9 and 7 open the parts; 5 joins 7 (12), 4 joins 9 (13), 3 joins 12
    assert balance([3, 9, 4, 7, 5], 2) == [[1, 2], [0, 3, 4]]


def test_balance_of_equal_rows_gives_equal_counts() -> None:
    assert [len(rows) for rows in balance([0] * 6, 3)] == [2, 2, 2]
    assert [len(rows) for rows in balance([8] * 8, 4)] == [2, 2, 2, 2]


def test_balance_of_fewer_rows_than_parts_leaves_parts_empty() -> None:
    assert balance([5], 3) == [[0], [], []]
    assert balance([], 2) == [[], []]


def test_balance_needs_a_part() -> None:
    with pytest.raises(AssertionError, match="0 parts"):
        balance([1], 0)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, parts=st.integers(1, 5))
def test_balance_uses_each_row_once_and_evens_out_tokens(lengths: list[int], parts: int) -> None:
    result = balance(lengths, parts)
    assert len(result) == parts
    assert sorted(row for rows in result for row in rows) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in rows) for rows in result]
    # The heaviest part got its last row when it was the lightest.
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    if len(lengths) >= parts:
        assert all(result)


def test_microbatches_by_hand() -> None:
    # Sorted lengths 2, 3, 3, 9, 20 with a budget of 9 tokens, padding included: 3 x 3; 1 x 9; 20 alone
    assert microbatches([9, 3, 20, 2, 3], 9) == [[3, 1, 4], [0], [2]]
    assert microbatches([9, 3, 20, 2, 3], 8) == [[3, 1], [4], [0], [2]]


def test_microbatches_of_nothing() -> None:
    assert microbatches([], 10) == []


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 120))
def test_microbatches_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    result = microbatches(lengths, budget)
    assert sorted(row for rows in result for row in rows) == list(range(len(lengths)))
    for rows in result:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
    longest = [max(lengths[row] for row in rows) for rows in result]
    assert longest == sorted(longest)


def test_one_row_more_would_break_the_budget() -> None:
    assert microbatches([4] * 10, 12) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
