"""Where Python looks for modules: the folders of a user's files come first, tandem's own sources not at all.

`python launch/main.py` puts `launch/` on `sys.path`, from where it reaches whatever is started, so that a user's
`import settings` would find `launch/settings.py`. Tandem itself is only ever imported as `tandem.*`.
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
_hidden: dict[str, ModuleType] = {}  # what libraries have loaded under the name of a user's file


def without_sources(entries: Sequence[str], asked_for: str = "") -> list[str]:
    """The entries of a `sys.path` but for tandem's folders, and its root unless it is one of those `asked_for`.

    `asked_for` is a value of PYTHONPATH. Empty entries, the working folder, become its path.
    """
    own = {ROOT / folder for folder in (*FOLDERS, "benchmarks", "tests")}
    if ROOT not in (Path(entry).resolve() for entry in asked_for.split(os.pathsep) if entry):
        own.add(ROOT)
    absolute = [entry or os.getcwd() for entry in entries]
    return [entry for entry in absolute if Path(entry).resolve() not in own]


def forget_script_folder() -> None:
    """Takes tandem's folders off `sys.path` of this process, where running one of their files as a script puts them."""
    own = {ROOT / folder for folder in FOLDERS}
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() not in own]


def put_first(folder: Path) -> None:
    """Makes a user's folder the first that this process looks into, from now on."""
    entry = str(folder)
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    _users.append(entry)


@contextmanager
def users_set_aside() -> Iterator[None]:
    """For what is ours after `put_first`: a user's file may be called as a module that a library needs.

    The body sees no module of a user, and a user none of the same name that was loaded in the body.
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
