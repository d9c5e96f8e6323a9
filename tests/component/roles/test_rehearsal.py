"""The estimated memory of passes, compared with torch's allocations in real passes of the workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.benchmarks.memory_plan import CASES, CPU, Case, allocated_peak, make_worker, one_pass, predicted, save_model
from tandem.platform.config.schema import ModelConfig, RolloutConfig
from tandem.platform.experience.batch import Prompt
from tandem.workers.engines.hf import _Decoding, sample
from tandem.workers.models.footprint import available_bytes
from tandem.workers.models.loading import load_policy, untrained
from tandem.workers.roles.rehearsal import Unknown, sampling_bytes, working_bytes
from tandem.workers.roles.rollout import RolloutSpec

PROMISED = 0.2  # of the measured peak
ROWS, WIDTH = 3, 128


def by_worker() -> dict[str, list[Case]]:
    """The cases of the benchmark that one worker can run, of any size."""
    found: dict[str, list[Case]] = {}
    for case in CASES:
        name = f"{case.shape}-{case.role}-{case.attention}{'-checkpointing' if case.checkpointing else ''}"
        found.setdefault(name, []).append(replace(case, width=WIDTH))
    return found


@pytest.mark.parametrize("cases", by_worker().values(), ids=by_worker().keys())
def test_a_pass_needs_what_is_predicted(cases: list[Case], tmp_path: Path) -> None:
    """Updates with and without checkpointing, of two sizes, and passes without a gradient."""
    first, path = cases[0], str(tmp_path)
    save_model(first, tmp_path)
    worker = make_worker(first, path)
    worker.max_tokens = max(case.rows * case.width for case in cases)
    one_pass(Case(first.shape, first.role, 1, 8), worker)()  # gradients and moments are allocated
    planned = {case.name: predicted(case, path) for case in cases}
    measured = {case.name: allocated_peak(one_pass(case, worker)) for case in cases}
    assert planned == pytest.approx(measured, rel=PROMISED)


def test_an_engine_needs_what_is_predicted(tmp_path: Path) -> None:
    """The engine samples 16 responses of the maximum length to 4 prompts of different lengths."""
    save_model(Case("llama", "actor", ROWS, WIDTH), tmp_path)
    settings, path = ModelConfig(), str(tmp_path)
    spec = RolloutSpec(path, settings, RolloutConfig())
    model, uniforms = load_policy(path, settings).eval().requires_grad_(False), torch.zeros(16, dtype=torch.float64)
    prompts = [Prompt((0,) * length, length, "") for length in (64, 63, 62, 61)]
    wanted = [(prompts[row // 4], row) for row in range(16)]

    @torch.inference_mode()
    def run() -> None:
        state = _Decoding(model, wanted, CPU)
        for _ in range(31):
            state.advance(sample(state.logits, 1.0, uniforms)[0], torch.arange(16))
        sample(state.logits, 1.0, uniforms)

    planned = sampling_bytes(spec, lambda: untrained(path, settings), 4, 16, (64, 32))
    assert planned == pytest.approx(allocated_peak(run), rel=PROMISED)


def test_a_model_that_looks_into_its_tensors_is_told_of(tmp_path: Path) -> None:
    case = Case("llama", "actor", ROWS, WIDTH)
    save_model(case, tmp_path)

    class Curious(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
            return [] if bool(input_ids.sum() > 0) else None

    from tandem.benchmarks.memory_plan import spec_of

    with pytest.raises(Unknown, match="DataDependent"):
        working_bytes(spec_of(case, str(tmp_path)), Curious, ROWS, WIDTH, train=True)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200"}, 500),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": "inactive_file 200"}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "1200",
                "memory/memory.stat": "total_inactive_file 0",
            },
            0,
        ),
        ({}, None),
    ],
    ids=["version 2", "no limit", "version 1", "none"],
)
def test_a_cgroup_limits_what_is_available(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = available_bytes(tmp_path)
    assert found == left if left is not None else found > 2**20
