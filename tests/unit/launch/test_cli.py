"""`tandem COMMAND`: the same commands by name, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tandem.launch.cli import MEANINGS, main
from tandem.launch.compose.command import QUIET, SCRIPTS, Call, as_called, command


@pytest.fixture(autouse=True)
def called_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "by_name", False)


def test_every_command_has_a_file_and_a_meaning(repo: Path) -> None:
    assert sorted(MEANINGS) == sorted(SCRIPTS.values())
    for file in SCRIPTS:
        assert (repo / "launch" / f"{file}.py").exists() or (repo / "benchmarks" / f"{file}.py").exists()


@pytest.mark.parametrize("name", MEANINGS)
def test_help_names_the_way_it_was_called(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"tandem {name}" in said
    assert ".py" not in said.replace("path.py", "")


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["help"]):
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert all(f"  {name} " in said for name in MEANINGS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tandem {version('tandem-rl')}\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", "`tandem train`"), ("algo=grpo", "`tandem train algo=grpo`"), ("x", "")]
)
def test_a_command_that_does_not_exist_is_answered(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{word}: no such command.")
    assert (f"Did you mean {hint}?" in said) == bool(hint)


def test_messages_name_the_way_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "zzz=1"]) == 2
    assert "`tandem train --settings` lists all" in capsys.readouterr().err
    assert (
        as_called("python launch/main.py, launch/evaluate.py, launch/assembly/roles.py")
        == "tandem train, tandem evaluate, launch/assembly/roles.py"
    )


def test_settings_can_be_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "lr_schedule"]) == 0
    said = capsys.readouterr().out
    assert "actor.lr_schedule=constant" in said
    assert "run.seed" not in said
    assert main(["settings", "no", "such", "thing"]) == 1


@pytest.mark.parametrize("name", ["train", "evaluate", "doctor", "benchmark"])
def test_commands_that_take_settings_list_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--settings"]) == 0
    said = capsys.readouterr().out
    assert "actor.lr_schedule=constant" in said
    assert ("completions: 256" in said) == (name == "benchmark")


def test_the_algorithms_fit_a_terminal(capsys: pytest.CaptureFixture[str], repo: Path) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    shown = {line.split()[0] for line in lines[1:] if not line.startswith(" ")}
    assert shown == {file.stem for file in (repo / "conf" / "algo").glob("*.yaml")}
    [vapo] = [number for number, line in enumerate(lines) if line.startswith("vapo")]
    assert lines[vapo].split() == ["vapo", "yes", "gae", "clipped_surrogate", "0.2", "/", "0.28", "token-mean"]
    assert "lambda by length, alpha 0.05; NLL of right answers, 0.1" in lines[vapo + 1]


def test_it_runs_from_another_folder_and_ends_with_its_reader(tmp_path: Path) -> None:
    """The command ends without an error when the reader closes the pipe, as in `tandem settings | head -1`."""
    tandem = Path(sys.executable).with_name("tandem")
    with subprocess.Popen([tandem, "settings"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"Defaults")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_without_its_packages_it_says_where_they_are(repo: Path) -> None:
    """The system's Python, used while the virtual environment is not active, lacks tandem's packages."""
    done = subprocess.run([sys.executable, "-S", "launch/main.py"], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("tandem is not installed in this Python")
    assert "source .venv/bin/activate" in done.stderr


def test_every_command_silences_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars and warnings of transformers are off in every command, unless the user has set them."""
    monkeypatch.setattr(os, "environ", {"TRANSFORMERS_VERBOSITY": "info"})

    @command("it")
    def one(arguments: list[str]) -> int:
        return 0

    assert one([]) == 0
    assert os.environ == {**QUIET, "TRANSFORMERS_VERBOSITY": "info"}
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
