"""Content of a run's folder, or quoted in a message, cannot control a terminal or inject markup into a page."""

from __future__ import annotations

import ast
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from run_folders import FILES, planted, write_run

from tandem.launch import evaluate, export, report, runs
from tandem.launch import main as training
from tandem.launch.views import page
from tandem.launch.views.display import PlainDisplay, RichDisplay, make_display
from tandem.launch.views.rendering import rendered
from tandem.platform.config.schema import TrackingConfig
from tandem.platform.system.terminal import one_line, say, shown

HTML = '<script>alert(1)</script>"><img src=x onerror=alert(1)>\' onload=alert(1) x="?token=x>'
STEERS = "\x1b]0;title\x07\x1b[2J\x9b31m\x85\r\b\x7f\u202edcba\u2066\u200b"
PAYLOAD = HTML + STEERS


def steering(text: str) -> set[str]:
    """Characters that no terminal may get from us."""
    return {one for one in text if one not in "\n\t" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


class Page(HTMLParser):
    """The elements of a page, each with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(tag, ""), *((tag, name) for name, _ in attrs)}


def elements(path: Path) -> set[tuple[str, str]]:
    text = path.read_text()
    assert not steering(text)
    return Page(text).found


def everything_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The exit codes of all commands that look at the run `a` of a folder, having checked what they print."""
    own = f"folder={folder}"
    codes = [report.main([str(folder / "a")]), runs.main([own])]
    codes += [runs.main(["show", "a", own]), runs.main(["compare", "a", "b", own])]
    said = "".join(capsys.readouterr())
    assert not steering(said)
    assert "Traceback" not in said
    return codes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    assert report.main([str(tmp_path / "b")]) == 0
    return tmp_path


@pytest.mark.parametrize("how", ["instead", "behind", "key"])
@pytest.mark.parametrize("name", FILES)
def test_nothing_planted_in_a_runs_folder_takes_effect(
    folder: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of every value, numbers and lists too, behind every text, behind every name."""
    clean = elements(folder / "b" / "report.html")

    def change(value: Any) -> Any:
        return PAYLOAD if how == "instead" else f"{value}{PAYLOAD}" if isinstance(value, str) else value

    for place, content in planted(FILES[name], change, keys=how == "key"):
        write_run(folder / "a", {name: content})
        (folder / "a" / "report.html").unlink(missing_ok=True)
        codes = everything_said(folder, capsys)
        assert set(codes) <= {0, 2}, place
        if codes[0] == 0:
            assert elements(folder / "a" / "report.html") <= clean, place


def test_a_secret_in_an_attribute_or_a_text_leaves_the_page_whole(folder: Path) -> None:
    """What follows a credential up to the next blank is taken out with it: of the text alone, not of the page."""
    write_run(folder / "a", {"summary.json": {"status": "https://h/?token=abc", "error": "?key=1"}})
    text = page.render(folder / "a")
    assert '<span class="badge">https://h/?token=***</span></div>' in text
    assert '<p class="failed">?key=***</p>' in text


@pytest.mark.parametrize("name", ["model.path", "data.eval", "run.name", "tracking.tags", "reward.function", "nothing"])
def test_a_setting_that_a_message_quotes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (training.main, evaluate.main):
        quoted = STEERS.replace("\\", "\\\\")
        assert command([f'{name}="{quoted}"', "cluster=inlne"]) == 2
        assert not steering("".join(capsys.readouterr()))


def test_a_name_that_export_quotes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [f"checkpoint={tmp_path}/{STEERS}\udcff", "to=x"],
        [STEERS, "to=x"],
        ["checkpoint=x", "to=x", STEERS],
    ):
        assert export.main(arguments) == 2
    said = "".join(capsys.readouterr())
    assert not steering(said)
    assert "\\x1b[2J" in said


def test_an_error_of_any_kind_is_shown_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(STEERS)

    monkeypatch.setattr(runs, "listing", fails)
    assert runs.main(["list"]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError: \\x1b]0;title\\x07" in said
    assert not steering(said)


@pytest.mark.parametrize("display", [PlainDisplay, RichDisplay])
def test_displays(display: type, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of held-out sets are the user's; a rich display moves the cursor, and takes no markup from a name."""
    one = display()
    one.begin(1)
    one.note(f"note {STEERS}")
    one.phase(f"[red]{STEERS}")
    one.progress(f"[red]{STEERS}", 1, 2)
    one.step(1, {"reward/mean": 0.5, f"eval/[/]{STEERS}/greedy": 0.5})
    one.close()
    said = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert not steering(said.replace("\r", ""))
    assert "note \\x1b]0;title" in said
    assert "eval/[/]\\x1b" in said
    make_display(TrackingConfig(console="none")).close()


def test_what_is_shown() -> None:
    assert shown("a\x1b[0m\tb\nc\r\x9b\u202e\udcff\U000e0041é😀👨\u200d👩") == (
        "a\\x1b[0m\tb\nc\\x0d\\x9b\\u202e\\udcff\\U000e0041é😀👨\u200d👩"
    )
    assert one_line("a\nb\tc") == "a\\nb\\tc"


def test_saying_goes_where_it_is_to(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "planted-value-1")
    say("out planted-value-1", end="")
    say("err", error=True)
    assert capsys.readouterr() == ("out ***", "err\n")


def test_a_template_makes_what_it_is_given_safe(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(
        '{% macro bold(text) %}<b>{{ text }}</b>{% endmacro %}<a class="{{ a }}">{{ bold(b) }}</a>'
    )
    assert rendered(tmp_path / "one", a='">\x1b', b="<i>&?token=x") == (
        '<a class="&#34;&gt;\\x1b"><b>&lt;i&gt;&amp;?token=***</b></a>'
    )
    with pytest.raises(UndefinedError, match="'b' is undefined"):
        rendered(tmp_path / "one", a="")


def calls(repo: Path) -> list[tuple[Path, ast.Call]]:
    folders = ("launch", "platform", "workers", "benchmarks")
    files = [path for folder in folders for path in sorted((repo / folder).rglob("*.py"))]
    return [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def test_one_function_prints(repo: Path) -> None:
    printing = {path.name for path, call in calls(repo) if isinstance(call.func, ast.Name) and call.func.id == "print"}
    assert printing == {"terminal.py"}
    for path, call in calls(repo):
        assert not re.match(r"sys\.(__)?std(out|err)(__)?\.(write|writelines)$", ast.unparse(call.func)), path


def test_only_templates_and_charts_make_markup(repo: Path) -> None:
    """Nothing else is trusted to be markup, and no template turns the escaping off."""
    assert {path.name for path, call in calls(repo) if ast.unparse(call.func) == "Markup"} == {"charts.py"}
    templates = [path for folder in ("launch", "benchmarks") for path in (repo / folder).rglob("templates/*")]
    assert len(templates) >= 5
    for path in templates:
        assert not re.search(r"\bsafe\b|autoescape", path.read_text()), path
        assert not re.search(r"=\{\{|=\{%", path.read_text()), path  # an attribute's value is in quotes
