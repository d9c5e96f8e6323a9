"""Manages `sys.path`: the folders of a user's files come first, and tandem's own source folders are removed.

`python launch/main.py` puts `launch/` on `sys.path`, and started processes inherit it. A user's `import settings` would
then find `launch/settings.py`. Tandem itself is imported only as `tandem.*`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("platform", "workers", "conf", "launch")
_users: list[str] = []
_hidden: dict[str, ModuleType] = {}  # modules of libraries that have the same name as a user's file


def without_sources(entries: Sequence[str], asked_for: str = "") -> list[str]:
    """The entries of a `sys.path` without tandem's folders, and without its root unless `asked_for` contains the root.

    `asked_for` is a value of PYTHONPATH. An empty entry stands for the working folder and is replaced by its path.
    """
    sources = {ROOT / folder for folder in (*FOLDERS, "benchmarks", "tests")}
    if ROOT not in (Path(entry).resolve() for entry in asked_for.split(os.pathsep) if entry):
        sources.add(ROOT)
    absolute = [entry or os.getcwd() for entry in entries]
    return [entry for entry in absolute if Path(entry).resolve() not in sources]


def forget_script_folder() -> None:
    """Removes tandem's folders from `sys.path` of this process. Running a file as a script adds its folder."""
    sources = {ROOT / folder for folder in FOLDERS}
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() not in sources]


def put_first(folder: Path) -> None:
    """Puts a user's folder first on `sys.path` of this process."""
    entry = str(folder)
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    _users.append(entry)


@contextmanager
def users_set_aside() -> Iterator[None]:
    """Hides user modules from tandem's own code after `put_first`: a user's file may shadow a module of a library.

    The body sees no user modules. Modules with the same name that the body loads are hidden from user code.
    """
    if not _users:
        yield
        return
    before, folders = list(sys.path), tuple(entry + os.sep for entry in _users)
    loaded = dict(sys.modules)
    theirs = {name: module for name, module in loaded.items() if str(getattr(module, "__file__", None)).startswith(folders)}
    sys.path[:] = [entry for entry in sys.path if entry not in _users]
    for name in theirs:
        del sys.modules[name]
    sys.modules.update(_hidden)
    try:
        yield
    finally:
        sys.path[:] = before
        new = [name for name in sys.modules if name in theirs or (name not in loaded and _is_a_users(name))]
        _hidden.update({name: sys.modules[name] for name in new})
        for name in _hidden:
            sys.modules.pop(name, None)
        sys.modules.update(theirs)


def _is_a_users(name: str) -> bool:
    files = [Path(entry, part) for entry in _users for part in (f"{name}.py", f"{name}/__init__.py")]
    return "." not in name and any(file.is_file() for file in files)
