"""Export of the trained policy as a Hugging Face folder, and evaluation of a model without training."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tandem.launch import evaluate, export
from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run that has changed its weights; its tokenizer has a chat template."""
    from tandem.platform.config.schema import ModelConfig, TaskConfig, TinyConfig, WarmstartConfig
    from tandem.workers.models.tiny import prepare_tiny
    from tandem.workers.models.tokenizer import load_tokenizer

    place = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_CACHE", str(place / "cache"))
        small = TinyConfig(hidden_size=64, intermediate_size=64, layers=2, heads=2)
        base = str(prepare_tiny(ModelConfig(tiny=small, warmstart=WarmstartConfig(steps=0)), TaskConfig()))
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    tokenizer.save_pretrained(base)
    own = [f"model.path={base}", "actor.lr=0.01", "algo.entropy_coef=1", "run.steps=2", "run.name=r", f"run.dir={place}"]
    tiny = [
        "rollout.max_response_tokens=8",
        "data.prompts_per_step=2",
        "task.eval_size=4",
        "cluster=inline",
        "tracking.console=none",
        "eval.every=2",
    ]
    config, _ = compose(["algo=grpo", *own, *tiny])
    assert run(config, time.time()) == 0
    return place / "r"


def test_what_is_exported_is_what_was_trained(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert export.main([f"checkpoint={trained}/checkpoints", f"to={tmp_path / 'out'}"]) == 0
    model = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    saved = safetensors.torch.load_file(trained / "checkpoints" / "step-000002" / "actor" / "00000.safetensors")
    weights = {name.removeprefix("weights/"): tensor for name, tensor in saved.items() if name.startswith("weights/")}
    assert model.keys() == weights.keys()
    assert all(torch.equal(model[name].data, weights[name]) for name in model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False) == "1+2="
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == len(tokenizer)
    own = tmp_path / "own"
    own.mkdir()  # with the permissions of the umask
    (own / "file").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(own / "file").stat().st_mode}
    assert (tmp_path / "out").stat().st_mode == own.stat().st_mode


def test_vllm_samples_from_it_what_transformers_does(trained: Path, tmp_path: Path) -> None:
    """Each engine runs in its own process, through the command that evaluates a model in bfloat16."""
    import subprocess
    import sys

    assert export.main([f"checkpoint={trained}/checkpoints/step-000002", f"to={tmp_path / 'out'}"]) == 0
    found = []
    for engine in ("hf", "vllm"):
        own = [f"model.path={tmp_path / 'out'}", f"rollout={engine}", "task.eval_size=16", f"to={tmp_path / engine}.json"]
        code = "import sys; from tandem.launch.evaluate import main; sys.exit(main(sys.argv[1:]))"
        more = ["reward.functions.matching_characters=1", "rollout.max_response_tokens=8"]
        command = [sys.executable, "-c", code, *own, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        found.append(json.loads((tmp_path / f"{engine}.json").read_text()))
    assert found[0] == found[1]


def test_the_dtype_can_be_chosen(trained: Path, tmp_path: Path) -> None:
    export.export(f"{trained}/checkpoints", tmp_path / "out", dtype="bfloat16")
    saved = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_what_cannot_be_read_back_is_not_left(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def refuse(*given: object, **more: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(OSError, match="the disk is full"):
        export.export(str(trained / "checkpoints"), tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_told(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for arguments, why in (
        ([f"checkpoint={trained}/checkpoints", f"to={tmp_path}/full"], "is not empty"),
        ([f"checkpoint={trained}/checkpoints", f"to={tmp_path}/x", "dtype=int4"], "expected float32 or bfloat16"),
        ([f"checkpoint={tmp_path}", f"to={tmp_path}/x"], "no checkpoint there"),
        (["to=x"], "checkpoint=... is missing"),
        (["chekpoint=x", "to=y"], "chekpoint: no such argument"),
    ):
        assert export.main(arguments) == 2
        assert why in capsys.readouterr().err


def test_several_sets_are_measured_by_name(tmp_path: Path, tiny_path: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, count in (("three", 3), ("one", 1)):
        rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"model.path={tiny_path}", f"data.eval={tmp_path}/three.jsonl", f"data.eval_sets.single={tmp_path}/one.jsonl"]
    own.append("rollout.max_response_tokens=8")
    assert evaluate.main([*own, "eval.samples_per_prompt=4", f"to={tmp_path}/out.json"]) == 0
    metrics = json.loads((tmp_path / "out.json").read_text())
    for name in ("three", "single"):
        assert {f"eval/{name}/{key}" for key in ("greedy", "mean", "pass@2", "pass@4", "majority@4")} <= metrics.keys()
    assert metrics["eval/single/greedy_low"] == metrics["eval/single/greedy"]
    assert "single/pass@4" in capfd.readouterr().out
    assert evaluate.main([*own, f"data.eval_sets.three={tmp_path}/one.jsonl"]) == 2
    assert "three is the name of two held-out sets" in capfd.readouterr().err
