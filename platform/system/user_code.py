"""Loads functions and records from a user's file, given as `path.py:name` in a setting."""

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
    """The object that `path.py:name` names.

    The file is executed once, as a module. It may import files in its folder at any time: the folder is put first on
    `sys.path`, as if the file were run as a script. Modules that are already loaded, such as `json`, are not replaced.

    Args:
        what: description of the object, for messages. error: exception class to raise if the object cannot be loaded.
    """
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise error(f"{what} must be given as path.py:name, not {spec!r}")
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise error(f"the file of {what} {spec!r} does not exist: {path}")
    attribute = getattr(_load_module(path, error), name, None)
    if attribute is None:
        raise error(f"{path} defines no {name!r}, which {what} {spec!r} names")
    return attribute


def describe_exception(error: BaseException, file: str | None = None) -> str:
    """`file:line: Type: message`, with the innermost line in `file` if the traceback has one."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename == file] or stack
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}: "  # the traceback ends at the import of the file
    return place + shorten(traceback.format_exception_only(error)[-1].strip(), 500)


def _load_module(path: Path, error: type[Exception]) -> ModuleType:
    name = f"tandem_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module here
    put_first(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        del sys.modules[name]
        raise error(f"could not import {path}: {describe_exception(failure, str(path))}") from failure
    return module
