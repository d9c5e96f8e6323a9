"""The embedded model: its tokenizer, its folder, its cache."""

import os
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tandem.platform.config.schema import ModelConfig, TaskConfig, TinyConfig, WarmstartConfig
from tandem.platform.data.tasks import load_task
from tandem.workers.models import tiny
from tandem.workers.models.tiny import cache_root, character_tokenizer, prepare_tiny, tiny_model

TASK = TaskConfig(eval_size=64)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def small(steps: int = 2, seed: int = 0) -> ModelConfig:
    sizes = TinyConfig(hidden_size=32, intermediate_size=64, layers=2, heads=2)
    return ModelConfig(tiny=sizes, warmstart=WarmstartConfig(steps=steps, batch_size=16, lr=1e-3, seed=seed))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    # Copies, because the tensors may be views of the file.
    return {name: t.clone() for name, t in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


def builds(folder_config: ModelConfig) -> int:
    """The number of fine-tuning steps that a call takes; 0 on a cache hit."""
    seen: list[int] = []
    prepare_tiny(folder_config, TASK, lambda step, total: seen.append(step))
    return sum(step > 0 for step in seen)


def test_folder_loads_and_knows_its_end_token() -> None:
    folder = prepare_tiny(small(), TASK)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    assert model.config.model_type == "qwen2"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.vocab_size == len(tokenizer) == 12 + 3
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_every_character_is_one_token_and_comes_back() -> None:
    folder = prepare_tiny(small(), TASK)
    tokenizer, characters = AutoTokenizer.from_pretrained(folder), load_task(TASK).characters
    for text in (characters, *characters, "37+48=85", "11+11=22"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("85<end>")["input_ids"], skip_special_tokens=True) == "85"


def test_other_characters_become_one_unknown_token_each() -> None:
    tokenizer = character_tokenizer("01")
    assert tokenizer("0x 1")["input_ids"] == [3, 2, 2, 4]


def test_default_size_is_about_a_million_parameters() -> None:
    model = tiny_model(TinyConfig(), character_tokenizer(load_task(TASK).characters))
    # per layer: attention 4 x 128 x 128 + 3 x 128 biases, MLP 3 x 128 x 512, 2 norms of 128; then embeddings and a norm
    assert sum(p.numel() for p in model.parameters()) == 4 * (65536 + 384 + 196608 + 256) + 15 * 128 + 128


def test_only_completions_and_their_end_are_learned() -> None:
    tokenizer = character_tokenizer("0123456789+=")
    examples = load_task(TaskConfig(digits=1, eval_size=1)).worked_examples
    tokens, labels = tiny._encode(tokenizer, examples)
    for row, example in enumerate(examples):
        learned = [token for token in labels[row].tolist() if token != tiny.IGNORED]
        assert tokenizer.decode(learned) == example.completion + "<end>"
        assert tokenizer.decode(tokens[row, :4].tolist()) == example.prompt


def test_held_out_prompts_are_never_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: set[str] = set()
    encode = tiny._encode

    def watched(tokenizer, examples):  # type: ignore[no-untyped-def]
        fed.update(example.prompt for example in examples)
        return encode(tokenizer, examples)

    monkeypatch.setattr(tiny, "_encode", watched)
    prepare_tiny(small(), TASK)
    task = load_task(TASK)
    assert len(fed) == 8100 - 64
    assert not fed & {row.prompt for row in task.held_out}


def test_loss_falls_on_the_task() -> None:
    before, after = prepare_tiny(small(steps=0), TASK), prepare_tiny(small(steps=60), TASK)

    def loss(folder: Path) -> float:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        tokens, labels = tiny._encode(tokenizer, load_task(TASK).worked_examples[:512])
        with torch.no_grad():
            return float(model(tokens, labels=labels).loss)

    assert loss(after) < loss(before) - 0.3


def test_second_call_is_a_cache_hit() -> None:
    assert builds(small(steps=3)) == 3
    assert builds(small(steps=3)) == 0
    assert builds(small(steps=4)) == 4


def test_settings_that_decide_nothing_share_an_entry() -> None:
    folder = prepare_tiny(small(), TASK)
    other = small()
    other.dtype, other.gradient_checkpointing = "bfloat16", True
    assert prepare_tiny(other, TASK) == folder
    assert prepare_tiny(small(), TaskConfig(eval_size=65)) != folder
    assert prepare_tiny(small(seed=1), TASK) != folder


@pytest.mark.parametrize("damage", ["cut", "remove", "manifest", "empty"])
def test_damaged_entry_is_rebuilt(damage: str) -> None:
    folder = prepare_tiny(small(), TASK)
    expected = weights(folder)
    file = folder / ("manifest.json" if damage == "manifest" else "model.safetensors")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "empty":
        for path in folder.iterdir():
            path.unlink()
    else:
        file.unlink()
    assert builds(small()) == 2
    rebuilt = weights(folder)
    assert all(torch.equal(rebuilt[name], tensor) for name, tensor in expected.items())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_same_settings_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights(prepare_tiny(small(), TASK))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "other"))
    torch.manual_seed(123)
    second = weights(prepare_tiny(small(), TASK))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_random_state_and_threads_of_the_caller_stay() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    prepare_tiny(small(), TASK)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_build_that_loses_the_race_uses_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier makes both builds finish before either publishes its result."""
    barrier, publish, folders = threading.Barrier(2), tiny._publish, []

    def together(building: Path, folder: Path) -> None:
        barrier.wait(60)
        publish(building, folder)

    monkeypatch.setattr(tiny, "_publish", together)
    threads = [threading.Thread(target=lambda: folders.append(prepare_tiny(small(), TASK))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert folders[0] == folders[1]
    assert tiny._is_intact(folders[0])
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_a_failed_build_leaves_nothing() -> None:
    def stop(step: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_tiny(small(), TASK, stop)
    assert list((cache_root() / "tiny").iterdir()) == []


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root() == Path(os.environ["TANDEM_CACHE"])
    monkeypatch.delenv("TANDEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "tandem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "tandem"
