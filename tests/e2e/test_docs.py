"""Runs every command and every block of Python of the guides in `docs/`, on a small scale.

`tests/distributed/test_two_nodes.py` runs the commands for several hosts.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.launch import cli
from tandem.launch.compose.command import Call
from tandem.launch.compose.compose import compose
from tandem.launch.compose.other_names import names

pytestmark = pytest.mark.slow

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # as the pages call it: here a folder with a small model
SMALL = (
    *("cluster=inline", "tracking.console=none", "model.warmstart.steps=0", "eval.every=0", "task.eval_size=4"),
    *("model.tiny.hidden_size=32", "model.tiny.intermediate_size=64", "model.tiny.layers=2"),
    *("data.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=8"),
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("gsm8k", "own_reward", "reward_model", "preemptible", "ppo_or_grpo", "python")


@pytest.fixture
def stand_ins(
    repo: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working folder with the models and data that the pages name."""
    models = tmp_path_factory.getbasetemp() / "docs-models"
    if not models.exists():
        make_models(models)
    (tmp_path / MODEL).parent.mkdir(parents=True)
    (tmp_path / MODEL).symlink_to(models / "policy")
    (tmp_path / "my-reward-model").symlink_to(models / "reward")
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(4)]
    for name in ("train", "test", "prompts"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "gsm8k").mkdir()
    worked = [
        {"question": f"Ann has {n} pens and buys {n}.", "answer": f"{n} + {n} = {2 * n}\n#### 1,00{n}"} for n in range(4)
    ]
    for name in ("train", "test"):
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in worked))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path_factory.getbasetemp() / "docs-cache"))
    monkeypatch.setattr(Call, "by_name", False)
    return tmp_path


def make_models(folder: Path) -> None:
    """Builds a policy with a chat template and an ASCII tokenizer, and a reward model with the same tokenizer."""
    import string

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    from tandem.workers.models.tiny import character_tokenizer

    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **special, **shape)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    Qwen2ForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)


def small(words: list[str]) -> list[str]:
    """The arguments of a command, with settings that make it small."""
    if words[0] == "benchmark":
        return [*words, "arms=[grpo_8]", "seeds=[0]", "completions=16", *SMALL[:2], SMALL[-1], "run.steps=1"]
    if words[0] == "evaluate":
        return [*words, SMALL[-1]]
    if words[0] != "train":
        return words
    steps = [] if any(word.startswith("run.epochs") for word in words) else ["run.steps=1"]
    if "checkpoint.resume" in " ".join(words):
        steps = ["run.steps=2"]
    return [*words, *SMALL, *steps]


def run_command(line: str) -> None:
    if loop := re.fullmatch(r"until (.*); do sleep 10; done", line):
        assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0
        line = loop[1]
    words = shlex.split(re.sub(r"step-\d{6}", "step-000001", line))
    assert words[0] == "tandem", line
    assert cli.main(small(words[1:])) == 0, line


def run_python(code: str, namespace: dict[str, Any]) -> None:
    """Runs a block, or writes it to the file that its first line names."""
    if name := re.match(r"# (\w+\.py)\n", code):
        Path(name[1]).write_text(code)
    else:
        exec(compile(code, "docs", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_written(page: str, repo: Path, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "python":
        monkeypatch.setattr("tandem.launch.compose.compose.compose", lambda given: compose([*given, *SMALL, "run.steps=1"]))
    namespace: dict[str, Any] = {}
    if page == "ppo_or_grpo":  # two runs that you have already
        assert cli.main(small(["train", "algo=grpo", "run.name=first"])) == 0
        shutil.copytree("outputs/first", "outputs/second")
    for language, code in BLOCK.findall((repo / "docs" / f"{page}.md").read_text()):
        if language == "python":
            run_python(code, namespace)
        else:
            for line in code.splitlines():
                run_command(line)
    if page == "python":
        assert namespace["code"] == 0
        assert [step["step"] for step in namespace["steps"]] == [0, 1]
    if page == "gsm8k":
        row = json.loads(Path("gsm8k/train-prompts.jsonl").read_text().splitlines()[1])
        assert row["answer"] == "1001"
        assert row["prompt"][0]["content"].startswith("Ann has 1 pens")
        assert Path("gsm8k-policy/model.safetensors").exists()


def test_every_page_is_listed_and_run(repo: Path) -> None:
    there = {path.stem for path in (repo / "docs").glob("*.md")} - {"README"}
    assert there == {*PAGES, "two_hosts", "migration"}
    listed = set(re.findall(r"\]\((\w+)\.md\)", (repo / "docs" / "README.md").read_text()))
    assert listed == there
    table = (repo / "docs" / "migration.md").read_text()
    for named in names():
        cells = [", ".join(f"`{name}`" for name in others) for others in (named.trl, named.verl, named.openrlhf)]
        assert f"\n| `{named.ours}` | {' | '.join(cells)} | {named.note} |\n" in table
    assert table.count("\n| `") == len(names())


def test_links_of_the_pages_lead_somewhere(repo: Path) -> None:
    for page in [*(repo / "docs").glob("*.md"), repo / "README.md", repo / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
