"""The embedded model: a small Qwen2 with a character tokenizer, warm-started on the task's worked examples.

The model is built on first use, in seconds, and kept in the user's cache, with one folder per combination of settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tandem.platform.config.schema import ModelConfig, TaskConfig, TinyConfig, WarmstartConfig
from tandem.platform.data.task import Task, WorkedExample
from tandem.platform.data.tasks import load_task
from tandem.platform.system.readers import read_object

FORMAT = 1  # part of the cache key: increase it when the same settings must give another model
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
MANIFEST = "manifest.json"
MAX_POSITIONS = 1024
MAX_THREADS = 8  # more threads only add overhead for a model of this size
# Larger than Qwen2's 0.02, which suits wide models: at width 128, a task takes about a third of the steps to learn.
INITIALIZER_RANGE = 0.05
IGNORED = -100  # label of tokens that are not learned

Progress = Callable[[int, int], None]


def prepare_tiny(model: ModelConfig, task: TaskConfig, on_progress: Progress | None = None) -> Path:
    """The folder of the embedded model for these settings; builds the model unless the cache holds it intact.

    `on_progress(step, total)` is called with step 0 before the first fine-tuning step, and after each step. Several
    processes can build the same entry at the same time: each builds a copy, and all use the copy that is finished first.
    """
    task_data = load_task(task)
    folder = cache_root() / "tiny" / _cache_key(model, task_data)
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _build(building, model, task_data, on_progress or (lambda step, total: None))
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def describe_tiny(model: ModelConfig, task: TaskConfig, folder: Path) -> None:
    """Writes config and tokenizer of the embedded model, without weights, into a folder."""
    tokenizer = character_tokenizer(load_task(task).characters)
    with torch.device("meta"):
        made = tiny_model(model.tiny, tokenizer)
    made.config.save_pretrained(folder)
    made.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cache_root() -> Path:
    """The folder for files that tandem can rebuild: $TANDEM_CACHE, $XDG_CACHE_HOME/tandem or ~/.cache/tandem."""
    if cache := os.environ.get("TANDEM_CACHE"):
        return Path(cache).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "tandem"
    return Path.home() / ".cache" / "tandem"


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character of `characters`; each other character becomes an unknown token, and none is dropped."""
    vocabulary = {token: number for number, token in enumerate((PAD, END, UNKNOWN, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def tiny_model(config: TinyConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 with fresh weights from torch's random state."""
    settings = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=True,
    )
    model = Qwen2ForCausalLM(settings)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def fine_tune(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[WorkedExample],
    config: WarmstartConfig,
    on_progress: Progress,
) -> None:
    """Fine-tunes `model` on the completions, end token included; prompt tokens do not count in the loss."""
    tokens_NT, labels_NT = _encode(tokenizer, examples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    order = _example_order(len(examples), config)
    model.train()
    on_progress(0, config.steps)
    for step in range(config.steps):
        rows = next(order)
        # No attention mask: padding is on the right, where causal attention never looks.
        logits = model(tokens_NT[rows]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels_NT[rows, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_progress(step + 1, config.steps)
    model.eval()


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warmup over the first tenth of the steps, then a cosine down to a tenth."""
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _encode(tokenizer: PreTrainedTokenizerFast, examples: Sequence[WorkedExample]) -> tuple[Tensor, Tensor]:
    """(N, T) tokens, right-padded, and labels, which are IGNORED on prompts and padding."""
    prompts = tokenizer([example.prompt for example in examples])["input_ids"]
    completions = tokenizer([example.completion + END for example in examples])["input_ids"]
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    tokens_NT = torch.full((len(examples), width), tokenizer.pad_token_id, dtype=torch.int64)
    labels_NT = torch.full((len(examples), width), IGNORED, dtype=torch.int64)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion)
        tokens_NT[row, :end] = torch.tensor(prompt + completion)
        labels_NT[row, start:end] = tokens_NT[row, start:end]
    return tokens_NT, labels_NT


def _example_order(size: int, config: WarmstartConfig) -> Iterator[Tensor]:
    """Yields the row numbers of each step, from shuffled passes over the examples joined end to end."""
    generator = torch.Generator().manual_seed(config.seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < config.batch_size:
            waiting = torch.cat([waiting, torch.randperm(size, generator=generator)])
        yield waiting[: config.batch_size]
        waiting = waiting[config.batch_size :]


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Fixes torch's random state and thread count (sums depend on both), and restores them after the body."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(min(len(os.sched_getaffinity(0)), MAX_THREADS))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _build(folder: Path, config: ModelConfig, task: Task, on_progress: Progress) -> None:
    tokenizer = character_tokenizer(task.characters)
    with _reproducible(config.warmstart.seed):
        model = tiny_model(config.tiny, tokenizer)
        fine_tune(model, tokenizer, task.worked_examples, config.warmstart, on_progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Written last: an entry without a manifest is unfinished.
    (folder / MANIFEST).write_text(json.dumps(_digests(folder), indent=1))


def _publish(building: Path, folder: Path) -> None:
    """Puts a finished entry in place, unless another process has done so in the meantime."""
    while not _is_intact(folder):
        try:
            building.rename(folder)
            return
        except OSError:
            # The folder exists: either another process has just finished it, or it is damaged.
            if not _is_intact(folder):
                damaged = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
                with_contents = damaged / "entry"
                folder.rename(with_contents)
                shutil.rmtree(damaged, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    """Whether an entry is complete and no file has changed since it was written."""
    try:
        return read_object(folder / MANIFEST, dict[str, str]) == _digests(folder)
    except (OSError, ValueError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _cache_key(model: ModelConfig, task: Task) -> str:
    """The task's name and a hash of everything that determines the weights."""
    parts = {
        "format": FORMAT,
        "tiny": asdict(model.tiny),
        "warmstart": asdict(model.warmstart),
        "characters": task.characters,
        "worked_examples": [(example.prompt, example.completion) for example in task.worked_examples],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{task.name}-{digest[:16]}"
