"""Runs that end and resume give the same results as uninterrupted runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.validate import validate

pytestmark = pytest.mark.slow

SMALL = (
    *("cluster=inline", "tracking.console=none", "data.prompts_per_step=4", "rollout.samples_per_prompt=2"),
    *("rollout.max_response_tokens=4", "task.eval_size=3", "checkpoint.every=2", "run.name=r"),
)
KINDS = {
    "ppo": (
        "algo=ppo",
        "algo.entropy_coef=0.1",
        "algo.kl_reward_coef=0.01",
        "algo.kl_target=0.1",
        "actor.lr_warmup_steps=5",
        "actor.lr=1e-2",
    ),
    "grpo": ("algo=grpo", "algo.kl_loss_coef=0.1", "actor.lr=1e-2", "reward.normalize=mean_std"),
    "dapo": (
        "algo=dapo",
        "actor.lr=1e-2",
        "actor.lr_schedule=wsd",
        "actor.lr_total_steps=6",
        "actor.lr_decay_fraction=0.9",
        "algo.dynamic_surplus=keep",
        "algo.dynamic_at_cap=mask",
        "reward.functions={matching_characters: 1.0}",
    ),
}


def train(path: str, folder: Path, *overrides: str) -> int:
    config, given = compose([*SMALL, f"model.path={path}", f"run.dir={folder}", *overrides])
    validate(config, given)
    return run(config, time.time())


def records(folder: Path, every: bool = False) -> list[dict[str, Any]]:
    """The records of the steps, without what differs between equal runs, such as times."""
    lines = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    own = ("time/", "memory/", "tokens/response_per_s", *(() if every else ("eval/",)))
    kept = [{key: value for key, value in line.items() if not key.startswith(own)} for line in lines]
    return [line for line in kept if every or "reward/mean" in line]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    place = folder / "r" / "checkpoints" / f"step-{step:06d}"
    for path in sorted(place.glob("*/*.safetensors")):
        whole |= {f"{path.parent.name}/{name}": tensor for name, tensor in safetensors.torch.load_file(path).items()}
    return whole | {"driver": torch.tensor(list((place / "driver.json").read_bytes()))}


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in (folder / "r" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_is_going_straight(tiny_path: str, tmp_path: Path, kind: str) -> None:
    """Every metric, weight and moment, and the state of the loop, are bitwise equal to those of an uninterrupted run."""
    assert train(tiny_path, tmp_path / "a", *KINDS[kind], "run.steps=6") == 0
    assert train(tiny_path, tmp_path / "b", *KINDS[kind], "run.steps=2") == 0
    assert train(tiny_path, tmp_path / "b", *KINDS[kind], "run.steps=6") == 0
    straight, again = records(tmp_path / "a"), records(tmp_path / "b")
    assert [record["step"] for record in again] == [1, 2, 3, 4, 5, 6]
    assert straight == again
    one, other = state(tmp_path / "a", 6), state(tmp_path / "b", 6)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    summary = json.loads((tmp_path / "b" / "r" / "summary.json").read_text())
    assert (summary["steps"], summary["resumed_after"], summary["eval_first"]["step"]) == (6, 2, 0)
    if kind == "ppo":
        assert straight[3]["kl/coef"] != straight[0]["kl/coef"]  # so the state of the KL controller matters
        # The reference is still the initial policy.
        assert straight[2]["policy/kl" if "policy/kl" in straight[2] else "kl/sampled"] > 0


def test_another_number_of_ranks_goes_on_with_the_next_prompts(tiny_path: str, tmp_path: Path, repo: Path) -> None:
    """Six rows, four per step: steps end inside an epoch and at its end."""
    data = tmp_path / "six.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(6)))
    alike = [*KINDS["grpo"], f"data.train={data}", "tracking.samples_every=1"]
    assert train(tiny_path, tmp_path / "a", *alike, "run.steps=6") == 0
    assert train(tiny_path, tmp_path / "b", *alike, "run.steps=3") == 0  # twelve rows: two full epochs
    more = [*SMALL[2:], *alike, f"model.path={tiny_path}", f"run.dir={tmp_path / 'b'}", "run.steps=6"]
    two = ["actor.ranks=2", "rollout.replicas=2", "cluster.num_cpus=2", "tracking.console=plain"]
    command = [sys.executable, "launch/main.py", *more, *two]
    done = subprocess.run(command, cwd=repo, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "changed since: actor.ranks 1 -> 2" in done.stdout
    assert prompts(tmp_path / "a") == prompts(tmp_path / "b")
    for one, other in zip(records(tmp_path / "a"), records(tmp_path / "b"), strict=True):
        assert one["reward/mean"] == pytest.approx(other["reward/mean"])
        assert one["policy/lr"] == other["policy/lr"]
        assert one["policy/kl"] == pytest.approx(other["policy/kl"], abs=1e-4)


def prompts(folder: Path) -> list[list[tuple[int, str]]]:
    files = sorted((folder / "r" / "samples").iterdir())
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    return [[(row["group_id"], row["prompt"]) for row in step] for step in rows]


@pytest.mark.parametrize(
    ("steps", "every", "keep", "expected"), [(5, 2, 9, [2, 4, 5]), (4, 2, 9, [2, 4]), (3, 0, 9, [3]), (5, 1, 2, [4, 5])]
)
def test_which_steps_are_saved(
    tiny_path: str, tmp_path: Path, steps: int, every: int, keep: int, expected: list[int]
) -> None:
    train(tiny_path, tmp_path, "algo=grpo", f"run.steps={steps}", f"checkpoint.every={every}", f"checkpoint.keep={keep}")
    assert saved(tmp_path) == expected


def test_checkpoints_in_an_object_store(tiny_path: str, tmp_path: Path) -> None:
    """fsspec's store in memory, which has no folders and no renaming, like S3."""
    store = f"checkpoint.dir=memory://{tmp_path.name}"
    assert train(tiny_path, tmp_path / "a", *KINDS["grpo"], "run.steps=4") == 0
    assert train(tiny_path, tmp_path / "b", *KINDS["grpo"], "run.steps=2", store) == 0
    assert train(tiny_path, tmp_path / "b", *KINDS["grpo"], "run.steps=4", store) == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")
    assert not (tmp_path / "b" / "r" / "checkpoints").exists()


def test_a_secret_is_nowhere(tiny_path: str, tmp_path: Path, repo: Path) -> None:
    """Secrets are planted in the environment, a tag, and an address that cannot be reached."""
    secret = "planted0secret0value"
    own = ["algo=grpo", f"model.path={tiny_path}", "run.steps=1", f"run.dir={tmp_path}", f"tracking.tags=[{secret}]"]
    command = [sys.executable, "launch/main.py", *SMALL, *own]
    for more in ([], [f"reward.function=/{secret}/missing.py:score", "run.name=other"]):
        done = subprocess.run(
            [*command, *more], cwd=repo, capture_output=True, text=True, env={**os.environ, "MY_SERVICE_PASSWORD": secret}
        )
        assert done.returncode == (1 if more else 0)
        assert secret not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


SECRETS = {
    "GITHUB_PAT": "planted-pat-0123456789",
    "CHAT_WEBHOOK": "https://hooks.example/planted/0123456789abcdef",
    "QUOTED_PASSWORD": 'planted\'s "quoted" & <b> secret',
    "PRIVATE_KEY": "-----BEGIN-----\nplanted1MIIEpAIBAAKCAQEA0Z3VS5JJ\nplanted2AbCdEfGhIjKlMnOpQrStUv\n-----END-----",
    "LONG_TOKEN": "planted" + " and more of it" * 40,
}


def test_secrets_of_every_form_are_nowhere(tiny_path: str, tmp_path: Path) -> None:
    """Secrets are planted in settings that a run writes, in prompts, and in the exception of a reward function."""
    data, own = tmp_path / "data.jsonl", tmp_path / "own.py"
    rows = [{"prompt": f"1+{n}=", "answer": list(SECRETS.values())[n % 5], "note": SECRETS["GITHUB_PAT"]} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own.write_text(
        "def fails(sample):\n    raise ValueError(f'no {sample.answer!r}')\n\ndef fine(sample):\n    return 1.0\n"
    )
    settings = [f"model.path={tiny_path}", "run.steps=1", f"run.dir={tmp_path}/out", f"data.train={data}", "algo=grpo"]
    for name in ("fine", "fails"):
        own_settings = [f"reward.function={own}:{name}", f"run.name={name}", "tracking.samples_every=1"]
        config, _ = compose([*SMALL[:-1], *settings, *own_settings])
        config.tracking.tags = list(SECRETS.values())
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in SECRETS.items():
                patch.setenv(variable, value)
            assert run(config, time.time()) == (1 if name == "fails" else 0)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        text = path.read_text(errors="replace")
        assert "planted" not in text, (path, text[max(0, text.find("planted") - 80) : text.find("planted") + 80])


def test_two_runs_of_one_seed_have_equal_facts(tiny_path: str, tmp_path: Path) -> None:
    """This includes their random generators, whatever the process did before."""

    def facts(name: str, seed: int) -> str:
        torch.rand(seed + len(name))
        assert train(tiny_path, tmp_path / name, "algo=ppo", "run.steps=1", f"run.seed={seed}") == 0
        place = tmp_path / name / "r" / "checkpoints" / "step-000001"
        return "".join((place / role / "facts.json").read_text() for role in ("actor", "critic"))

    assert facts("a", 1) == facts("bb", 1)
    assert facts("ccc", 2) != facts("a2", 1)


def test_nothing_is_left_to_do(tiny_path: str, tmp_path: Path) -> None:
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2") == 0
    before, summary = records(tmp_path, every=True), json.loads((tmp_path / "r" / "summary.json").read_text())
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2") == 0
    assert records(tmp_path, every=True) == before
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["metrics"] == summary["metrics"]
    assert saved(tmp_path) == [2]


def test_evaluation_leaves_training_alone_and_is_told_with_its_step(tiny_path: str, tmp_path: Path) -> None:
    assert train(tiny_path, tmp_path / "a", *KINDS["grpo"], "run.steps=3", "eval.every=1", "eval.samples_per_prompt=2") == 0
    assert train(tiny_path, tmp_path / "b", *KINDS["grpo"], "run.steps=2", "eval.before_training=false") == 0
    assert train(tiny_path, tmp_path / "b", *KINDS["grpo"], "run.steps=3") == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")
    evaluated = [
        record["step"] for record in records(tmp_path / "b", every=True) if any(key.startswith("eval/") for key in record)
    ]
    assert evaluated == [2, 2, 3]  # at the end of the first run, when the second resumes, and at its end


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["run.seed=1"], r"written with run\.seed=0, but this run has 1"),
        (["data.prompts_per_step=2"], r"data\.prompts_per_step=4, but this run has 2"),
        (["adv_estimator=gae"], "has no critic, but adv_estimator needs one"),
        (["checkpoint.resume=never"], "holds a run already"),
        (["checkpoint.resume=missing/step-000002"], "missing/step-000002 is not a complete checkpoint"),
    ],
)
def test_what_cannot_go_on_is_refused(tiny_path: str, tmp_path: Path, changed: list[str], said: str) -> None:
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2") == 0
    with pytest.raises((ConfigError, AssertionError), match=said):
        assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=4", *changed) == 0, summary_error(tmp_path)


def summary_error(folder: Path) -> str:
    return str(json.loads((folder / "r" / "summary.json").read_text())["error"])


def test_data_that_has_changed_is_refused(tiny_path: str, tmp_path: Path) -> None:
    """The same rows in another order are refused; the same rows in another file are the same data."""
    rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=2", f"data.train={tmp_path}/a.jsonl") == 0
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=4", f"data.train={tmp_path}/b.jsonl") == 0
    (tmp_path / "b.jsonl").write_text("\n".join(reversed(rows)))
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=6", f"data.train={tmp_path}/b.jsonl") == 1
    assert "6 training prompts that differ from this run's 6 in content or order" in summary_error(tmp_path)
    assert saved(tmp_path)[-1] == 4


def test_a_changed_coefficient_takes_effect(tiny_path: str, tmp_path: Path) -> None:
    assert train(tiny_path, tmp_path, "algo=ppo", "algo.kl_reward_coef=0.1", "run.steps=2") == 0
    assert train(tiny_path, tmp_path, "algo=ppo", "algo.kl_reward_coef=0.7", "run.steps=3") == 0
    assert [record["kl/coef"] for record in records(tmp_path)] == [0.1, 0.1, 0.7]


def test_a_branch_from_an_older_checkpoint(tiny_path: str, tmp_path: Path) -> None:
    """A branch needs its own folder; in the folder of the run it would mix two histories."""
    assert train(tiny_path, tmp_path, "algo=grpo", "run.steps=4") == 0
    older = f"checkpoint.resume={tmp_path}/r/checkpoints/step-000002"
    with pytest.raises(ConfigError, match="does not resume from its newest checkpoint"):
        train(tiny_path, tmp_path, "algo=grpo", "run.steps=6", older)
    assert train(tiny_path, tmp_path / "branch", "algo=grpo", "run.steps=3", older) == 0
    assert [record["step"] for record in records(tmp_path / "branch")] == [3]
    assert saved(tmp_path) == [2, 4]
