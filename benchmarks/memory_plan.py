"""Compares the memory plan's prediction for training and scoring passes with the memory that real passes need.

python benchmarks/memory_plan.py      # on this machine's CPU; writes benchmarks/results/memory_plan.md
python benchmarks/memory_plan.py --out /tmp/memory.md

Every row is a fresh process with one thread: the worker of the role, a model with random weights, and one update or scoring
pass over one micro-batch. `allocator` is the peak of bytes allocated by torch. `resident` is the peak resident memory of
the process minus its memory before the pass. It includes freed blocks of less than 32 MiB, which the C library keeps;
their share is largest for small models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from tandem.platform.config.schema import ActorConfig, AlgoConfig, CriticConfig, ModelConfig, TrainerConfig
from tandem.platform.system.terminal import say
from tandem.platform.system.text import human_bytes
from tandem.workers.cluster.runtime import Rank, peak_memory_bytes
from tandem.workers.models.loading import untrained
from tandem.workers.models.value import ValueModel
from tandem.workers.roles.actor import ActorSpec, ActorWorker
from tandem.workers.roles.critic import CriticSpec, CriticWorker
from tandem.workers.roles.rehearsal import micro_batch, working_bytes

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SHAPES: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2000,
    ),
    "qwen2": Qwen2Config(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=16000,
        tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=3000, bos_token_id=1, eos_token_id=1),
    "135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
}
"""Grouped-query attention; a large tied vocabulary; learned positions and GELU; the shape of SmolLM-135M."""


@dataclass(frozen=True)
class Case:
    """One pass: its model, its role and its micro-batch."""

    shape: str
    role: str
    rows: int
    width: int  # tokens
    checkpointing: bool = False
    train: bool = True
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        """The name in the table and in test ids."""
        kind = "update" if self.train else "score"
        more = [*(["checkpointing"] if self.checkpointing else []), *(["eager"] if self.attention == "eager" else [])]
        return ", ".join([f"{self.shape} {self.role} {kind} {self.rows} x {self.width}", *more])


CASES = [
    Case(shape, "actor", rows, 256, checkpointing)
    for shape in ("llama", "qwen2", "gpt2")
    for checkpointing in (False, True)
    for rows in (3, 6)
]
CASES += [Case(shape, "actor", 6, 256, train=False) for shape in ("llama", "qwen2", "gpt2")]
CASES += [
    Case("llama", "critic", 6, 256),
    Case("llama", "critic", 6, 256, train=False),
    Case("llama", "actor", 3, 256, attention="eager"),
]
LARGE = [Case("135M", "actor", 2, 1024), Case("135M", "actor", 4, 1024), Case("135M", "actor", 4, 1024, checkpointing=True)]


def save_model(case: Case, folder: Path) -> None:
    """Saves a model of the case's shape with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[case.shape]).save_pretrained(folder)


def spec_of(case: Case, path: str) -> ActorSpec | CriticSpec:
    """The spec of the case's worker."""
    model, tokens = ModelConfig(gradient_checkpointing=case.checkpointing), case.rows * case.width
    if case.role == "critic":
        return CriticSpec(path, model, CriticConfig(), TrainerConfig(), "token-mean", case.width, tokens, 60.0)
    return ActorSpec(path, model, ActorConfig(), TrainerConfig(), AlgoConfig(), 1.0, case.width, tokens, 60.0)


def predicted(case: Case, path: str) -> int:
    """Predicted bytes of the pass."""
    spec = spec_of(case, path)

    def make() -> Any:
        model = untrained(path, spec.model, body=case.role == "critic")
        model.set_attn_implementation(case.attention)
        return ValueModel(model) if case.role == "critic" else model

    return working_bytes(spec, make, case.rows, case.width, train=case.train)


def make_worker(case: Case, path: str) -> ActorWorker | CriticWorker:
    """The started worker of the case."""
    spec, rank = spec_of(case, path), Rank(threads=1, device="cpu")
    worker = CriticWorker(spec, rank) if isinstance(spec, CriticSpec) else ActorWorker(spec, rank)
    worker.start()
    backend: Any = worker.backend
    model = backend.engine.module
    getattr(model, "body", model).set_attn_implementation(case.attention)
    return worker


def one_pass(case: Case, worker: ActorWorker | CriticWorker) -> Callable[[], Any]:
    """The pass of the case, as the driver calls it."""
    batch = micro_batch(case.rows, case.width)
    batch.rollout.lengths.fill_(case.width)
    batch.rollout.lengths[0] = case.width - 3  # padding, so there is a mask
    batch.rollout.response_mask[:, case.width // 2 : -3] = True
    if case.train:
        return lambda: worker.update([batch])
    return lambda: worker.values(batch.rollout) if isinstance(worker, CriticWorker) else worker.logprobs(batch.rollout)


def allocated_peak(run: Callable[[], Any]) -> int:
    """Peak bytes that torch's CPU allocator allocated during `run`, not counting earlier allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measured(case: Case, path: str) -> dict[str, int]:
    """Measured bytes of the pass, resident and by the allocator; needs a fresh process."""
    torch.set_num_threads(1)
    worker = make_worker(case, path)
    run = one_pass(case, worker)
    small = one_pass(Case(case.shape, case.role, 1, 8, train=case.train), worker)
    small()  # loads kernel code, and allocates gradients and moments
    before = psutil.Process().memory_info().rss
    run()
    resident = peak_memory_bytes(CPU) - before
    return {"resident": resident, "allocator": allocated_peak(run)}


def in_fresh_process(case: Case) -> dict[str, int]:
    """The results of `one`, from a fresh process."""
    number = (CASES + LARGE).index(case)
    command = [sys.executable, str(Path(__file__)), "--one", str(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    numbers: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def one(case: Case) -> dict[str, int]:
    """The predicted and measured bytes of a case, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, Path(folder))
        return {"predicted": predicted(case, folder), **measured(case, folder)}


def row_of(case: Case, found: dict[str, int]) -> str:
    """A line of the table."""
    plan, allocator, resident = found["predicted"], found["allocator"], found["resident"]
    shown = [human_bytes(size) for size in (plan, allocator, resident)]
    return f"| {case.name} | {' | '.join(shown)} | {plan / allocator:.2f} | {plan / resident:.2f} |"


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/memory_plan.md")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        say(json.dumps(one((CASES + LARGE)[options.one])))
        return
    lines = [
        "# Memory of a pass: predicted and measured",
        "",
        "Without weights, gradients and optimizer. By `python benchmarks/memory_plan.py`, which explains the columns.",
        f"torch {torch.__version__}, float32, on CPU.",
        "",
        "| pass | predicted | allocator | resident | predicted / allocator | predicted / resident |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES + LARGE:
        lines.append(row_of(case, in_fresh_process(case)))
        say(lines[-1])
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
