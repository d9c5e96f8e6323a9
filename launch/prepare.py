"""What a run needs before its roles: the model's folder, the prompts, the number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.platform.batch import Prompt
from tandem.platform.config import Config, ConfigError
from tandem.platform.data import DataOrder, Row, read_rows
from tandem.platform.evaluate import Evaluation
from tandem.platform.prompts import EncodedRows, encode_rows
from tandem.platform.source import PromptSource, as_prompt
from tandem.platform.tasks import load_task


def model_path(config: Config, on_progress: Callable[[int, int], None]) -> str:
    """The folder or hub name of the first weights; builds the embedded model if the cache lacks it."""
    if config.model.path is not None:
        return config.model.path
    from tandem.workers.tiny import prepare_tiny

    return str(prepare_tiny(config.model, config.task, on_progress))


def training_prompts(config: Config, tokenizer: Any, note: Callable[[str], None]) -> PromptSource:
    """The training prompts as tokens, in the order of the seed."""
    rows, source = _rows(config, config.data.train, held_out=False)
    encoded = _encode(config, rows, tokenizer, source, note)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return PromptSource(encoded.rows, DataOrder(len(encoded.rows), config.data.prompts_per_step, seed, config.data.shuffle))


def evaluation(config: Config, tokenizer: Any, note: Callable[[str], None]) -> Evaluation | None:
    """The held-out set: data.eval, or the embedded task's when training on it; None when there is none."""
    if config.data.eval is None and config.data.train is not None:
        return None
    rows, source = _rows(config, config.data.eval, held_out=True)
    encoded = _encode(config, rows, tokenizer, source, note)
    prompts: list[Prompt] = [as_prompt(row, number) for number, row in enumerate(encoded.rows)]
    return Evaluation(
        name=Path(config.data.eval).stem if config.data.eval else config.task.name,
        prompts=prompts,
        max_tokens=config.rollout.max_response_tokens,
        samples_per_prompt=config.eval.samples_per_prompt,
        temperature=config.rollout.temperature,
    )


def training_steps(config: Config, rows: int) -> int:
    """run.steps, or the steps of run.epochs passes over so many rows, rounded up."""
    if config.run.steps is not None:
        return config.run.steps
    assert config.run.epochs is not None, "validate() wants one of run.steps and run.epochs"
    return math.ceil(config.run.epochs * rows / config.data.prompts_per_step)


def check_context(config: Config, path: str) -> None:
    """Refuses sequences longer than the model has positions for.

    Raises:
        ConfigError: both lengths, and what to set.
    """
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path} cannot be loaded: {error}") from error
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.max_sequence_tokens > limit:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens} = {config.max_sequence_tokens} tokens, but the model at {path} has "
            f"{limit} positions. Lower one of the two to {limit} tokens together"
        )


def _rows(config: Config, path: str | None, held_out: bool) -> tuple[list[Row], str]:
    if path is not None:
        return read_rows(path, config.data.prompt_key, config.data.answer_key), path
    task = load_task(config.task)
    return list(task.held_out if held_out else task.train), f"task={task.name}"


def _encode(config: Config, rows: list[Row], tokenizer: Any, source: str, note: Callable[[str], None]) -> EncodedRows:
    data = config.data
    encoded = encode_rows(rows, tokenizer, data.max_prompt_tokens, data.overlong_prompt, source)
    changed = encoded.cut + encoded.dropped
    if changed:
        what = "cut" if encoded.cut else "dropped"
        note(
            f"{source}: {changed} of {len(rows)} prompts over data.max_prompt_tokens={data.max_prompt_tokens} tokens {what}"
        )
    return encoded
