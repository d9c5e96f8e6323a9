"""Weight transfer: the choice of transport, and the packing of a bucket into one block of bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.platform.config.schema import ConfigError
from tandem.workers.sync.transports import Layout, ObjectStore, choose_transport


@pytest.mark.parametrize(
    ("nodes", "on_gpu", "partners", "expected"),
    [
        (["a", "a", "a"], False, [0, None], "shared"),
        (["a", "b"], False, [None], "broadcast"),
        (["a", "a"], True, [0], "ipc"),
        (["a", "a", "b"], True, [0, 1], "ipc"),  # each replica receives from the rank on its GPU, on any host
        (["a", "a", "a"], True, [None, None], "broadcast"),
        (["a", "a", "a"], True, [0, None], "shared"),  # NCCL does not support two ends on one GPU
    ],
)
def test_auto_follows_the_placement(nodes: list[str], on_gpu: bool, partners: list[int | None], expected: str) -> None:
    assert choose_transport("auto", nodes, on_gpu, partners) == expected
    assert choose_transport("shared", nodes, on_gpu, partners) == "shared"


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "partners", "why"),
    [
        ("ipc", False, [0], "needs an actor rank on the GPU of every rollout replica"),
        ("ipc", True, [0, None], "needs an actor rank on the GPU of every rollout replica"),
        ("broadcast", True, [0, 1], "the actor's first rank and a rollout replica share one"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(wanted: str, on_gpu: bool, partners: list[int | None], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        choose_transport(wanted, ["a", "a"], on_gpu, partners)


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


def test_the_object_store_sends_one_array_and_gives_the_tensors_back() -> None:
    bucket = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "none": torch.zeros(0)}
    sent = ObjectStore().send(bucket)
    assert sent.content.nbytes == 32
    found = ObjectStore().receive(sent)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [0.0, 1.0, 2.0],
        "b": [[1.0, 1.0], [1.0, 1.0]],
        "none": [],
    }
    assert found["b"].dtype == torch.bfloat16
