"""The parts of a dead worker's log that are read."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

from tandem.workers.cluster.postmortem import LINES, TAIL_BYTES, last_lines, tail


def test_standard_error_comes_last_and_rays_markers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "worker-a-7.out").write_text(":actor_name:Critic\nout\n\n")
    (tmp_path / "worker-a-7.err").write_text("".join(f"error {number}\n" for number in range(30)))
    (tmp_path / "worker-a-77.err").write_text("another process\n")
    assert tail(tmp_path, 7) == ["out", *(f"error {number}" for number in range(30 - LINES, 30))]


def test_of_a_large_log_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "worker-a-7.err"
    path.write_text("first\n")
    os.truncate(path, 2**29)  # a sparse file, which takes no space on the disk
    with path.open("a") as file:
        file.write("\nthe last words\n")
    tracemalloc.start()
    try:
        assert tail(tmp_path, 7) == ["the last words"]
        assert tracemalloc.get_traced_memory()[1] < 16 * TAIL_BYTES
    finally:
        tracemalloc.stop()


def test_a_line_that_is_cut_is_left_out(tmp_path: Path) -> None:
    """A secret that is cut in two would not be recognised and redacted."""
    path = tmp_path / "log"
    path.write_text("s" * TAIL_BYTES + "\nlast\n")
    assert last_lines(path) == ["last"]
    path.write_text("all\nof it\n")
    assert last_lines(path) == ["all", "of it"]
