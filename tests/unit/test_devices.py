"""Which device a rank uses: the one Ray gave it, however much of the node it can see."""

from __future__ import annotations

import os

import pytest

from tandem.workers import runtime
from tandem.workers.runtime import device_index, own_interface


@pytest.mark.parametrize(
    ("given", "visible", "noset", "expected"),
    [
        ([], None, False, 0),  # outside Ray
        (["3"], "3", False, 0),  # Ray shows the process its own device alone
        (["3"], None, True, 3),  # the process sees all of the node
        (["6"], "4,6,7", True, 1),  # the node itself was limited to three
        (["6"], "4, 6, 7", True, 1),
        (["GPU-b"], "GPU-a,GPU-b", True, 1),
        ([], "4,6", True, 0),  # a rank without a device of its own
    ],
)
def test_device_index(given: list[str], visible: str | None, noset: bool, expected: int) -> None:
    assert device_index(given, visible, noset) == expected


@pytest.mark.parametrize(("before", "inside"), [(None, "lo"), ("eth7", "eth7")])
def test_ranks_meet_on_the_network_of_their_address(
    monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str
) -> None:
    """And leave the environment as it was: other nodes' networks may be called otherwise."""
    monkeypatch.setattr(runtime, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")
    if before is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with own_interface():
        assert os.environ["GLOO_SOCKET_IFNAME"] == inside
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
