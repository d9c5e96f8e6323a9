"""Runs with invalid files: every command names the file and the problem, and shows the other runs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from run_folders import FILES, as_text, planted, write_run

from tandem.launch import report, runs
from tandem.launch.assembly.resume import checkpoints_of
from tandem.launch.assembly.run import make_folder
from tandem.launch.compose.compose import compose
from tandem.launch.views import page
from tandem.launch.views.run import read
from tandem.platform.config.schema import ConfigError
from tandem.platform.planning.validate import validate
from tandem.platform.records.recorder import Recorder
from tandem.platform.system.files import FileError

READ = [name for name in FILES if name != "versions.json"]
CONTENTS = {
    "deep lists": "[" * 100_000 + "\n",
    "deep objects": '{"a":' * 100_000 + "\n",
    "no UTF-8": "\udcff\n",
    "a number": "3\n",
    "a list": "[]\n",
    "nothing": "null\n",
    "a text": '"x"\n',
    "a date": "2026-01-01\n",
    "half": '{"a": \n',
    "zeros": "\0" * 100 + "\n",
}
VALUES = (True, "x", [], {}, None, math.nan, math.inf, 1e308, -1e308, 5e-324, -1, 0, 10**400, 2**62, 2**80, [[[[[]]]]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


def check_told(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts that each command that reads the file reports it in one line, and that the list shows the other run."""
    if not name.startswith("samples"):  # the list does not read samples
        assert runs.main([f"folder={folder}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["b", "a"]
        assert lines[2].startswith(f"a is left out: {folder}/a/{name}")
        for arguments in (["show", "a"], ["compare", "b", "a"]):
            assert runs.main([*arguments, f"folder={folder}"]) == 2
    assert report.main([str(folder / "a")]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith((f"runs: {folder}/a/{name}", f"report: {folder}/a/{name}"))
    assert not (folder / "a" / "report.html").exists()


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_holds_something_else(
    folder: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder / "a", {name: CONTENTS[content]})
    check_told(folder, name, capsys)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_something_that_is_no_file(folder: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a" / name).unlink()
    (folder / "a" / name).mkdir() if kind == "folder" else os.mkfifo(folder / "a" / name)
    check_told(folder, name, capsys)


@pytest.mark.parametrize("name", READ)
def test_a_file_of_a_gigabyte(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(folder / "a" / name, 2**30)
    check_told(folder, name, capsys)


def test_a_file_where_a_folder_is_expected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a" / "samples" / "step-000001.jsonl").unlink()
    (folder / "a" / "samples").rmdir()
    (folder / "a" / "samples").write_text("")
    check_told(folder, "samples is not a folder", capsys)
    assert runs.main([f"folder={folder}/a/run.json"]) == 2
    assert "run.json: cannot be read" in capsys.readouterr().err


def test_a_run_that_was_killed_is_read_up_to_its_last_whole_line(folder: Path) -> None:
    metrics = as_text("metrics.jsonl", FILES["metrics.jsonl"])
    for tail in ('{"step": 2, "rew', "\0\0\0", '{"step": "\udcc3'):
        write_run(folder / "a", {"metrics.jsonl": metrics + tail})
        assert (read(folder / "a").step, read(folder / "a").reward) == (1, 0.25)
    write_run(folder / "a", {"metrics.jsonl": ""})
    (folder / "a" / "summary.json").unlink()
    assert (read(folder / "a").step, read(folder / "a").status) == (0, "running or killed")


@pytest.mark.parametrize("name", READ)
def test_every_field_may_hold_any_value(folder: Path, name: str) -> None:
    """Any value is either shown, or refused with the names of file and field."""
    other = read(folder / "b")
    for value in VALUES:
        for place, content in planted(FILES[name], lambda _, value=value: value):
            write_run(folder / "a", {name: content})
            try:
                runs.compare(other, read(folder / "a"))
                runs.show(read(folder / "a"))
                page.render(folder / "a")
                continue
            except FileError as error:
                said = str(error)
            assert said.startswith(f"{folder}/a/{name}"), (place, value)
            names = [key for key in place.strip("/").split("/") if not key.isdecimal()]
            assert not names or any(name in said for name in names), (place, value)


TEXTS = ("${", "${run.seed}", "${oc.env:HOME}", "???", "1e5", "2026-01-01", "a: b", "\\${", "\x1b")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_settings_are_read_as_they_were_written(tmp_path: Path, text: str) -> None:
    """Strings that look like interpolations of a configuration library are kept as they are."""
    escaped = text.replace("${", "\\${").replace("\\\\${", "\\\\\\${")
    config, _ = compose(["run.name=a", f"run.dir={tmp_path}"])
    config.tracking.tags, config.tracking.project, config.data.eval_sets = [text], text, {text: text}
    make_folder(config, 0.0, checkpoints_of(config), None)
    found = read(tmp_path / "a")
    assert found.settings["tracking.tags"] == [text]
    assert found.settings["tracking.project"] == found.settings[f"data.eval_sets.{text}"] == text
    assert found.tags == text
    if text.startswith("${"):
        assert compose([f"tracking.tags=['{escaped}']"])[0].tracking.tags == [text]


@pytest.mark.parametrize("text", ["${", "${a", "x${"])
@pytest.mark.parametrize("key", ["tracking.tags", "tracking.project", "rollout.stop", "data.eval_sets"])
def test_a_reference_that_is_none_is_refused_with_its_setting(key: str, text: str) -> None:
    forms = {"tracking.project": f"'{text}'", "data.eval_sets": f"{{a: '{text}'}}"}
    with pytest.raises(ConfigError, match=rf"^{key}=.*as a text it is written") as caught:
        compose([f"{key}={forms.get(key, f'[{chr(39)}{text}{chr(39)}]')}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("tracking.tags=" + "[" * 100_000 + "]" * 100_000, "brackets are more than 64 deep"),
        ("run.seed=" + "9" * 5000, "cannot be read"),
        ("run.seed=" + "9" * 400, "run.seed has 1329 bits"),
        ("model.path=" + "x" * 5000, None),
        ("model.path='~nobody-here/x'", None),
        ("reward.function='~nobody-here/x.py:f'", None),
    ],
)
def test_settings_that_no_run_can_have(setting: str, said: str | None) -> None:
    if said is None:
        compose([setting])
        return
    with pytest.raises(ConfigError, match=said):
        validate(*compose([setting]))


def test_a_name_that_is_no_utf_8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder / os.fsdecode(b"\xff\x1b"))
    write_run(folder / os.fsdecode(b"\xfe"), {"config.yaml": "[]"})
    assert runs.main([f"folder={folder}"]) == 0
    said = capsys.readouterr().out
    assert "\n\\udcff\\x1b  ppo" in said
    assert "\\udcfe is left out" in said
    assert report.main([str(folder / os.fsdecode(b"\xff\x1b"))]) == 0
    assert "\\udcff\\x1b" in (folder / os.fsdecode(b"\xff\x1b") / "report.html").read_text()


def test_records_that_a_run_cannot_go_on_from(folder: Path) -> None:
    """A broken line is an error unless it is an incomplete last line, which a killed process leaves."""
    for content in ("3\n", '{"reward/mean": 1}\n', json.dumps({"step": "1"}) + "\n"):
        write_run(folder / "a", {"metrics.jsonl": content})
        with pytest.raises(FileError, match=r"metrics\.jsonl, line 1"):
            Recorder(folder / "a", 0.0, resumed_after=1)
