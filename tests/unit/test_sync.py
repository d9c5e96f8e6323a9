"""Weights on their way: which transport, and how a bucket becomes one run of bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.sync import Layout, ObjectStore, choose_transport


@pytest.mark.parametrize(
    ("nodes", "on_gpu", "share_device", "expected"),
    [
        (["a", "a", "a"], False, False, "shared"),
        (["a", "a"], True, True, "ipc"),
        (["a", "a", "a"], True, False, "broadcast"),
        (["a", "b"], False, False, "broadcast"),
        (["a", "b"], True, True, "broadcast"),
    ],
)
def test_auto_follows_the_placement(nodes: list[str], on_gpu: bool, share_device: bool, expected: str) -> None:
    assert choose_transport("auto", nodes, on_gpu, share_device) == expected
    assert choose_transport("shared", nodes, on_gpu, share_device) == "shared"


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), dtypes), max_size=6))
def test_a_packed_bucket_is_unpacked_as_it_was(tensors: list[tuple[list[int], torch.dtype]]) -> None:
    bucket = {f"tensor {number}": torch.randint(-9, 9, shape).to(dtype) for number, (shape, dtype) in enumerate(tensors)}
    layout = Layout.of(bucket)
    found = layout.unpack(layout.pack(bucket, torch.device("cpu")))
    assert list(found) == list(bucket)
    for name, tensor in bucket.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_no_two_tensors_share_a_byte() -> None:
    layout = Layout.of({"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(1)})
    assert [(name, offset, size) for name, _, _, offset, size in layout.tensors] == [
        ("a", 0, 12),
        ("b", 16, 10),
        ("c", 32, 4),
    ]
    assert layout.size == 48


def test_the_object_store_sends_the_tensors_themselves() -> None:
    bucket = {"a": torch.zeros(3)}
    assert ObjectStore().receive(ObjectStore().send(bucket)) is bucket
