"""Prepares and checks what a run needs before its roles start: the model's folder, the prompts, the number of steps."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.data.prompt_source import PromptSource, as_prompt
from tandem.platform.data.prompts import EncodedRow, EncodedRows, encode_rows
from tandem.platform.data.rows import DataError, DataOrder, Row, read_rows
from tandem.platform.data.tasks import load_task
from tandem.platform.experience.batch import Prompt
from tandem.platform.loop.evaluate import Evaluation
from tandem.platform.rewards.answers import check_answers
from tandem.platform.rewards.functions import is_whole_reward, part_name, verifier_of
from tandem.platform.rewards.prefill import check_beginnings
from tandem.workers.models.description import check_description, embedding_rows, end_token_ids, output_rows
from tandem.workers.models.loading import LOAD_ERRORS, cannot_load, check_score_head
from tandem.workers.models.tokenizer import load_tokenizer
from tandem.workers.roles.rollout import engine_name


def model_path(config: Config, on_progress: Callable[[int, int], None]) -> str:
    """The folder or hub name of the first weights; builds the embedded model if the cache lacks it."""
    if config.model.path is not None:
        return config.model.path
    from tandem.workers.models.tiny import prepare_tiny

    return str(prepare_tiny(config.model, config.task, on_progress))


@dataclass(frozen=True)
class Inputs:
    """The tokenized data of a run, and its number of training steps."""

    source: PromptSource
    evaluations: list[Evaluation]
    steps: int


def read_inputs(config: Config, model: str, note: Callable[[str], None]) -> Inputs:
    """Reads and checks the data of the run for the model at `model`, a folder or hub name.

    Raises:
        ConfigError, DataError: the data or a setting cannot be used; the message says why and what to set.
    """
    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    check_critic(config, model, tokenizer)
    check_stop_ids(config, model, tokenizer)
    source = training_prompts(config, model, tokenizer, note)
    return Inputs(source, evaluations(config, model, tokenizer, note), training_steps(config, len(source.rows)))


def training_prompts(config: Config, model: str, tokenizer: Any, note: Callable[[str], None]) -> PromptSource:
    """The training prompts as tokens of the model at `model`, in the order of the seed.

    Raises:
        ConfigError, DataError: a row cannot be used.
    """
    rows, source = _rows(config, config.data.train, held_out=False)
    encoded = _encode(config, model, rows, tokenizer, source, note)
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return PromptSource(encoded.rows, DataOrder(len(encoded.rows), config.prompts_per_step, seed, config.data.shuffle))


def evaluations(config: Config, model: str, tokenizer: Any, note: Callable[[str], None]) -> list[Evaluation]:
    """The held-out sets as tokens of the model at `model`: data.eval (or the embedded task's set when training on it), then
    data.eval_sets. May be empty.

    Raises:
        ConfigError: two sets have the same name.
    """
    sets: list[tuple[str, str | None]] = []
    if config.data.eval is not None:
        sets.append((Path(config.data.eval).stem, config.data.eval))
    elif config.data.train is None:
        sets.append((config.task.name, None))
    sets += config.data.eval_sets.items()
    names = [name for name, _ in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"data.eval_sets: {twice[0]} is the name of two held-out sets. Rename one of them")
    return [_evaluation(config, model, name, path, tokenizer, note) for name, path in sets]


def _evaluation(
    config: Config, model: str, name: str, path: str | None, tokenizer: Any, note: Callable[[str], None]
) -> Evaluation:
    rows, source = _rows(config, path, held_out=True)
    encoded = _encode(config, model, rows, tokenizer, source, note)
    prompts: list[Prompt] = [as_prompt(row, number) for number, row in enumerate(encoded.rows)]
    rollout, samples = config.rollout, config.eval.samples_per_prompt
    length = rollout.max_response_tokens
    verifier = verifier_of(config.eval.function, config.reward.functions)
    return Evaluation(
        name,
        prompts,
        length,
        samples,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        part_name(verifier) if verifier else None,
        with_reward=verifier is not None and not is_whole_reward(verifier, config.reward),
    )


def training_steps(config: Config, rows: int) -> int:
    """run.steps, or the number of steps in run.epochs passes over `rows` rows, rounded up."""
    if config.run.steps is not None:
        return config.run.steps
    assert config.run.epochs is not None, "validate() requires one of run.steps and run.epochs"
    return math.ceil(config.run.epochs * rows / config.prompts_per_step)


def check_model(config: Config, path: str) -> None:
    """Refuses a model with too few positions for the sequences, or that could not be saved and exported after training.

    Raises:
        ConfigError: the message says why and what to set.
    """
    check_context(config, path)
    with tempfile.TemporaryDirectory() as folder:
        check_description(path, config.model, Path(folder))


def check_context(config: Config, path: str) -> None:
    """Refuses sequences that are longer than the positions of the model or the reward model.

    Raises:
        ConfigError: with both lengths and what to set.
    """
    _check_positions(config, "model.path", path)
    if config.reward.model is not None:
        _check_positions(config, "reward.model", config.reward.model)


def check_critic(config: Config, model: str, tokenizer: Any) -> None:
    """Refuses a `critic.path` that lacks the head that `critic.head` asks for, or that cannot read the sequences of the
    actor (the model at `model`) because of other tokens, too few tokens, or too few positions.

    Raises:
        ConfigError: the message says what differs.
    """
    path = config.critic.path
    if path is None:
        return
    if config.critic.head == "score":
        check_score_head(path, config.model)
    _check_positions(config, "critic.path", path)
    vocabulary = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code).get_vocab()
    different = sorted(token for token, number in tokenizer.get_vocab().items() if vocabulary.get(token) != number)
    if different:
        raise ConfigError(
            f"critic.path={path} has another vocabulary than the actor: {len(different)} of its tokens have another id or "
            f"are missing, {different[0]!r} first. Set critic.path to a model of the same family, or leave it out"
        )
    largest = max(output_rows(model, config.model) - 1, *tokenizer.get_vocab().values())
    if largest >= (rows := embedding_rows(path, config.model, body=True)):
        raise ConfigError(
            f"critic.path={path} has {rows} embedding rows, for token ids 0 to {rows - 1}, but the actor's tokens go up to "
            f"{largest}. Resize the critic's embedding to {largest + 1} rows, or leave critic.path out"
        )


def check_engine(config: Config) -> None:
    """Refuses a rollout engine that is not installed, before anything is built.

    Raises:
        ConfigError: the engine is missing; the message says what to install.
    """
    engine_name(config.rollout.engine, torch.cuda.is_available())


def check_stop_ids(config: Config, model: str, tokenizer: Any) -> None:
    """Refuses `rollout.stop_token_ids`, or end tokens of the model at `model`, that can never be sampled.

    Raises:
        ConfigError: with these ids and the number of tokens.
    """
    rows = output_rows(model, config.model)
    sizes = f"the model at {model} samples {rows} tokens, 0 to {rows - 1}, and its tokenizer has {len(tokenizer)}"
    unknown = [number for number in config.rollout.stop_token_ids if not 0 <= number < rows]
    if unknown:
        raise ConfigError(f"rollout.stop_token_ids: {', '.join(map(str, unknown))} cannot occur: {sizes}. Remove them")
    ends = end_token_ids(model, tokenizer)
    if ends and not any(0 <= number < rows for number in ends):
        raise ConfigError(
            f"no response could ever end: the end token {', '.join(map(str, sorted(ends)))} cannot occur, {sizes}. "
            "Resize the model's embedding to its tokenizer, or correct eos_token_id in its generation_config.json"
        )


def _check_positions(config: Config, key: str, path: str) -> None:
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except LOAD_ERRORS as error:
        raise cannot_load(f"{key}={path}", path, error) from error
    text = model.get_text_config()
    limits = {
        "has {} positions": getattr(text, "max_position_embeddings", None),
        "scales positions differently in batches with a row over {} tokens (longrope), so the score of a row would depend "
        "on the other rows": _longrope_switch(text),
    }
    length = config.max_sequence_tokens
    for why, limit in limits.items():
        if limit is not None and length > limit:
            raise ConfigError(
                f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_response_tokens="
                f"{config.rollout.max_response_tokens} = {length} tokens, but the model at {key}={path} "
                f"{why.format(limit)}. Lower one of the two, to {limit} tokens together"
            )


def _longrope_switch(model: Any) -> int | None:
    """The longest row length up to which longrope uses its short factors; a longer row changes the whole batch."""
    rope = getattr(model, "rope_parameters", None) or {}
    # The parameters are those of all layers, or one dictionary per layer type.
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if kind.get("rope_type") == "longrope" and kind.get("short_factor") != kind.get("long_factor"):
            return kind.get("original_max_position_embeddings")
    return None


def _rows(config: Config, path: str | None, held_out: bool) -> tuple[list[Row], str]:
    if path is not None:
        rows = read_rows(path, config.data.prompt_key, config.data.answer_key)
        if not config.reward.allow_errors:
            check_answers(rows, list(config.reward.functions))
        return rows, path
    task = load_task(config.task)
    return list(task.held_out if held_out else task.train), f"task={task.name}"


def _encode(
    config: Config, model: str, rows: list[Row], tokenizer: Any, source: str, note: Callable[[str], None]
) -> EncodedRows:
    data = config.data
    check_beginnings(rows, source)
    encoded = encode_rows(rows, tokenizer, data.max_prompt_tokens, data.overlong_prompt, source)
    changed = encoded.cut + encoded.dropped
    if changed:
        what = "cut" if encoded.cut else "dropped"
        note(
            f"{source}: {changed} of {len(rows)} prompts over data.max_prompt_tokens={data.max_prompt_tokens} tokens {what}"
        )
    _check_ids(encoded.rows, embedding_rows(model, config.model), model, tokenizer, source)
    if encoded.continued:
        note(
            f"{source}: {encoded.continued} of {len(encoded.rows)} prompts end with an assistant message, which the policy "
            "continues"
        )
    if unknown := _with_unknown(encoded.rows, tokenizer):
        note(
            f"warning: {source}: {unknown} of {len(encoded.rows)} prompts have characters that the model's tokenizer does "
            "not know and cannot tell apart. Set model.path to a model that knows them"
        )
    return encoded


def _check_ids(rows: Sequence[EncodedRow], limit: int, model: str, tokenizer: Any, source: str) -> None:
    """Refuses prompts with a token that the model has no embedding for.

    Raises:
        DataError: with the first such row and both sizes.
    """
    for number, row in enumerate(rows, start=1):
        if (largest := max(row.ids)) >= limit:
            raise DataError(
                f"{row.row.where or f'{source}, row {number}'}: the prompt has token {largest} "
                f"({tokenizer.convert_ids_to_tokens(largest)!r}), but the model at {model} has {limit} embedding rows, for "
                f"tokens 0 to {limit - 1}; its tokenizer has {len(tokenizer)} tokens. Resize the model's embedding to its "
                "tokenizer, or leave the token out"
            )


def _with_unknown(rows: Sequence[EncodedRow], tokenizer: Any) -> int:
    """The number of prompts with an unknown token. Some tokenizers need no unknown token and set it to another token."""
    token = tokenizer.unk_token_id
    if token is None or token in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return 0
    return sum(token in row.ids for row in rows)
