"""Models with additional files: a trained model can be exported with all files of the base model unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_models import small_config
from transformers import GenerationConfig, Qwen2ForCausalLM

from tandem.launch import export
from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import ConfigError, ModelConfig
from tandem.workers.models.description import check_description, end_token_ids, save_description
from tandem.workers.models.tiny import character_tokenizer

DIGITS = "0123456789+="
CODE = {
    "configuration_own.py": """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=16, width=8, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, width, 1
        self.max_position_embeddings = 128
        super().__init__(**more)
""",
    "helpers.py": """
import torch

def running_mean(hidden):
    return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
""",
    "modeling_own.py": """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.cache_utils import DynamicCache
from .configuration_own import OwnConfig
from .helpers import running_mean

class OwnPreTrained(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0, 0.3)

class OwnModel(OwnPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, position_ids=None, **more):
        return BaseModelOutputWithPast(last_hidden_state=running_mean(self.embed(input_ids)))

class OwnForCausalLM(OwnPreTrained, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("scale", torch.full((1,), 3.0))
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, use_cache=None, logits_to_keep=0, **more):
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        return CausalLMOutputWithPast(logits=self.head(hidden) * self.scale)
""",
}
SMALL = (
    *("cluster=inline", "tracking.console=none", "data.prompts_per_step=4", "rollout.max_response_tokens=1", "algo=grpo"),
    "data.max_prompt_tokens=64",
    *("task.eval_size=2", "run.name=r", "run.steps=2", "actor.lr=0.01", "reward.functions={matching_characters: 1.0}"),
)


def train(folder: Path, *overrides: str) -> None:
    config, _ = compose([*SMALL, f"model.path={folder / 'base'}", f"run.dir={folder}", *overrides])
    assert run(config, time.time()) == 0


def base(folder: Path) -> Path:
    """Makes a folder with a small Qwen2 and many kinds of additional files."""
    tokenizer = character_tokenizer(DIGITS)
    torch.manual_seed(0)
    Qwen2ForCausalLM(small_config(len(tokenizer))).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for name, content in {"LICENSE": "mine", "chat_template.jinja": "{{ messages }}", "notes/use.md": "short"}.items():
        (folder / "base" / name).parent.mkdir(exist_ok=True)
        (folder / "base" / name).write_text(content)
    for name in ("optimizer.pt", "checkpoint-3/config.json", ".cache/x", "model.safetensors.index.json", "old.gguf"):
        (folder / "base" / name).parent.mkdir(exist_ok=True)
        (folder / "base" / name).write_text("left behind")
    return folder / "base"


@pytest.mark.slow
def test_a_generation_config_that_cannot_be_saved_again_is_kept(tmp_path: Path) -> None:
    """transformers reads this config but refuses to write it; the run must not fail at its first checkpoint."""
    written = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1, "own_key": [1, 2]}
    (base(tmp_path) / "generation_config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        GenerationConfig.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "again")
    train(tmp_path)
    export.export(str(tmp_path / "r" / "checkpoints"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == written


def test_folders_that_are_links_are_copied_and_loops_are_not_followed(tmp_path: Path) -> None:
    folder = base(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tools.jinja").write_text("{{ tools }}")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    (folder / "step-by-step.md").write_text("a file, no folder")
    save_description(str(folder), tmp_path / "copy")
    assert (tmp_path / "copy" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert (tmp_path / "copy" / "step-by-step.md").exists()
    assert not (tmp_path / "copy" / "loop").exists()


def test_files_are_copied_as_they_are_and_weights_are_not(tmp_path: Path) -> None:
    folder = base(tmp_path)
    save_description(str(folder), tmp_path / "copy")
    copied = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    names = ["LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "notes/use.md", "tokenizer.json"]
    assert copied == {*names, "tokenizer_config.json"}
    assert all((tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes() for name in copied)


@pytest.mark.slow
def test_a_model_with_its_own_code_is_exported_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, tokenizer = tmp_path / "base", character_tokenizer(DIGITS)
    folder.mkdir()
    for name, content in CODE.items():
        (folder / name).write_text(content)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = {"model_type": "own", "auto_map": own, "vocab_size": len(tokenizer), "eos_token_id": 1, "own_key": "kept"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    make = (
        "import sys, torch\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "torch.manual_seed(0)\n"
        "config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)\n"
        "from safetensors.torch import save_file\n"
        "save_file(dict(model.state_dict()), sys.argv[1] + '/model.safetensors', metadata={'format': 'pt'})\n"
    )
    subprocess.run([sys.executable, "-c", make, str(folder)], check=True, timeout=120)
    train(tmp_path, "model.trust_remote_code=true")
    asked = [f"checkpoint={tmp_path}/r/checkpoints", f"to={tmp_path}/out"]
    assert export.main(asked) == 2
    assert "If the model has custom code, set trust_remote_code=true" in capfd.readouterr().err
    assert export.main([*asked, "trust_remote_code=true"]) == 0
    assert all((tmp_path / "out" / name).read_text() == content for name, content in CODE.items())
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert again == {**config, "dtype": "float32", "architectures": ["OwnForCausalLM"]}
    read = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(sorted(model.state_dict()), float(model.scale))\n"
    )
    done = subprocess.run([sys.executable, "-c", read, f"{tmp_path}/out"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['head.weight', 'model.embed.weight', 'scale'] 3.0", done.stderr


def test_what_an_export_will_need_is_tried_before_training(tmp_path: Path) -> None:
    """A missing tokenizer file is reported before training, not when the trained policy is exported."""
    folder = base(tmp_path)
    check_description(str(folder), ModelConfig(), tmp_path / "tried")
    (folder / "tokenizer.json").rename(folder / "tokenizer.bin")  # named like a weight file, so an export does not copy it
    with pytest.raises(ConfigError, match=r"base cannot be exported: .*tokenizer"):
        check_description(str(folder), ModelConfig(), tmp_path / "again")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {1, 5}),
        ({"eos_token_id": [5, 7]}, {}, {1, 5, 7}),
        ({"do_sample": True}, {"eos_token_id": 6}, {1, 6}),
        ({"do_sample": True}, {"eos_token_id": [6, 7]}, {1, 6, 7}),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 6}}, {1, 6}),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 0}}, {0, 1}),
        (None, {"eos_token_id": 6}, {1, 6}),
        (None, {}, {1}),
        ({"do_sample": True}, {}, {1}),
    ],
)
def test_a_response_ends_by_what_the_model_says(
    tmp_path: Path, generation: dict[str, object] | None, config: dict[str, object], expected: set[int]
) -> None:
    """The tokenizer's end token (1) always ends a response; the default of the model type (Llama's 2) never does."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 15, **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(str(tmp_path), character_tokenizer(DIGITS)) == expected
