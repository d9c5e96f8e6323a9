"""Functions and records of a user's own file, named as `path.py:name` in a setting."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.platform.system.search_path import put_first
from tandem.platform.system.text import shorten


def load_attribute(spec: str, what: str, error: type[Exception]) -> Any:
    """What `path.py:name` names.

    The file is run once, as a module, and may import files that lie beside it, now and later: their folder comes first
    from here on, as if the file were run by itself. A module that is loaded already, as `json`, stays what it is.

    Args:
        what: is looked for, in words, for messages. error: the class of what is raised if there is none.
    """
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise error(f"{what} is named as path.py:name, not {spec!r}")
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise error(f"the file of {what} {spec!r} does not exist: {path}")
    found = getattr(_load_module(path, error), name, None)
    if found is None:
        raise error(f"{path} defines no {name!r}, which {what} {spec!r} names")
    return found


def describe_exception(error: BaseException, file: str | None = None) -> str:
    """`file:line: Type: message`, at the innermost line in `file` if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}: "  # the traceback ends where the file was imported
    return place + shorten(traceback.format_exception_only(error)[-1].strip(), 500)


def _load_module(path: Path, error: type[Exception]) -> ModuleType:
    name = f"tandem_own_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise error(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    put_first(path.parent)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        del sys.modules[name]
        raise error(f"could not import {path}: {describe_exception(failure, str(path))}") from failure
    return module
