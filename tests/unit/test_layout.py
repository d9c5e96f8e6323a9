"""The layout: `platform/` as a namespace portion, import directions, the content of a wheel."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from rooms import ORDER, imports_of_rooms, picture

FOLDERS = ("platform", "workers", "conf", "launch", "benchmarks")
ALLOWED = {
    "platform": {"platform"},
    "workers": {"workers", "platform"},
    "conf": set[str](),
    "launch": {"launch", "workers", "platform", "conf"},
    "benchmarks": {"benchmarks", "launch", "workers", "platform", "conf"},
}
FORBIDDEN_IN_PLATFORM = {"ray", "deepspeed", "vllm", "hydra", "omegaconf", "transformers"}


def sources(repo: Path, folder: str) -> list[Path]:
    return sorted((repo / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, including imports inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "tandem" else {str(node.module)}
            )
    return found


def test_platform_is_no_package(repo: Path) -> None:
    assert not (repo / "platform" / "__init__.py").exists()
    assert not (repo / "tests" / "platform").exists()
    for folder in ("workers", "conf", "launch"):
        assert (repo / folder / "__init__.py").exists()


def test_the_standard_library_wins_with_the_root_on_the_path(repo: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import platform, uuid; print(platform.__file__)"
    done = subprocess.run([sys.executable, "-c", code, str(repo)], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.startswith(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_directions(repo: Path, folder: str) -> None:
    for path in sources(repo, folder):
        for name in imports(path):
            top, _, rest = name.partition(".")
            assert top not in FOLDERS or top == "platform", f"{path}: import {name} as tandem.{name}"
            if top == "tandem":
                assert rest.partition(".")[0] in ALLOWED[folder], f"{path} imports {name}"
            if folder == "platform":
                assert top not in FORBIDDEN_IN_PLATFORM, f"{path} imports {name}"


def test_rooms_import_those_below_them() -> None:
    found = imports_of_rooms()
    assert set(found) == {*ORDER, "workers"}  # workers/__init__.py
    for room, others in found.items():
        for other, files in others.items():
            allowed = ORDER[: ORDER.index(room) + 1]
            assert other in allowed, f"{files} of {room} import {other}, which lies above\n\n{picture()}"


def test_the_schema_needs_no_torch() -> None:
    """Help and error messages of the command line appear before any large library is imported."""
    modules = "tandem.platform.config.schema, tandem.launch.main, tandem.launch.compose.compose"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_a_run_in_one_process_needs_no_ray(tmp_path: Path) -> None:
    small = ["run.steps=1", "model.warmstart.steps=0", "data.prompts_per_step=2", "task.eval_size=4", "checkpoint.every=0"]
    code = (
        "import sys\nsys.modules['ray'] = None  # an import of it fails\n"
        "from tandem.launch.cli import main\nsys.exit(main(['train', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, "cluster=inline", f"run.dir={tmp_path}", *small]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TANDEM_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_scripts_shadow_no_module(repo: Path) -> None:
    """`python launch/main.py` puts launch/ first on sys.path, also in every Ray worker."""
    names = {path.stem for path in (repo / "launch").iterdir()} - {"__init__", "__pycache__"}
    installed = {path.name.removesuffix(".py") for path in Path(sysconfig.get_path("purelib")).iterdir()}
    assert not names & (set(sys.stdlib_module_names) | installed)


def test_packages_are_all_listed(repo: Path) -> None:
    listed = tomllib.loads((repo / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        "tandem." + ".".join(path.parent.relative_to(repo).parts) for folder in FOLDERS for path in sources(repo, folder)
    }
    assert set(listed) == {*there, "tandem.platform"}  # contains only its README


def test_choices_are_what_the_registries_hold() -> None:
    from tandem.platform.config.schema import Config, each_setting
    from tandem.platform.planning.choices import REGISTRIES
    from tandem.workers.roles.rollout import ENGINES
    from tandem.workers.roles.trained import BACKENDS

    known = {key: meta for key, _, meta in each_setting(Config())}
    assert REGISTRIES.keys() <= known.keys()
    assert not any(known[key]["choices"] for key in REGISTRIES)  # in one place
    # platform cannot import from workers.
    assert set(known["rollout.engine"]["choices"]) == {"auto", *ENGINES}
    assert set(known["trainer.name"]["choices"]) == set(BACKENDS)


def test_every_setting_is_read(repo: Path) -> None:
    """Every setting in the schema is read by some code."""
    from tandem.platform.config.schema import Config, each_setting

    folders = ("platform", "workers", "launch")
    code = "\n".join(
        path.read_text()
        for folder in folders
        for path in sources(repo, folder)
        if path.parent.name != "config" and path.name != "settings.py"
    )
    read = {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    read |= {
        node.attr
        for node in ast.walk(ast.parse((repo / "platform" / "config" / "schema.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    unread = [key for key, _, _ in each_setting(Config()) if key.rpartition(".")[2] not in read]
    assert not unread


def test_files_and_functions_stay_small(repo: Path) -> None:
    for folder in FOLDERS:
        for path in sources(repo, folder):
            text = path.read_text()
            assert len(text.splitlines()) <= 400, path
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


@pytest.mark.slow
def test_the_wheel_holds_everything(repo: Path, tmp_path: Path) -> None:
    """An editable install also finds files that are not listed; a wheel must contain all of them."""
    checkout = tmp_path / "checkout"
    for folder in FOLDERS:
        shutil.copytree(repo / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo / name, checkout)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tandem/")}
    expected = {
        f"tandem/{path.relative_to(repo)}"
        for folder in FOLDERS
        for path in (repo / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".md", ".html", ".css") and not {"__pycache__", "results"} & set(path.parts)
    }
    assert packed == expected
    check_installed(wheel, tmp_path)


def check_installed(wheel: Path, folder: Path) -> None:
    """Asserts that an installation from a wheel works in another folder, without the checkout."""
    place, elsewhere = folder / "site", folder / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    tandem, own = str(place / "bin" / "tandem"), {**os.environ, "PYTHONPATH": str(place)}
    where = "import tandem.launch.cli as found; print('grpo', found.__file__)"
    for command in (
        [tandem, "train", "algo=grpo", "dry_run=true"],
        [tandem, "benchmark", "--settings"],
        [tandem, "algorithms"],
        ["-c", where],
    ):
        done = subprocess.run([sys.executable, *command], cwd=elsewhere, capture_output=True, text=True, env=own)
        assert done.returncode == 0, done.stderr
        assert "grpo" in done.stdout
    assert Path(done.stdout.split()[1]).is_relative_to(place)
    assert not any(elsewhere.iterdir())
