"""A run's `config.yaml`: the settings as plain YAML, in which `${...}` and dates are texts and `1e-5` is a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.platform.system.files import MIB, FileError, read_text
from tandem.platform.system.readers import parsed

LARGEST = MIB  # bytes
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+|[-+]?(nan|inf)", re.IGNORECASE)
"""Numbers that YAML 1.1 reads as texts, unlike YAML 1.2."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses aliases: tandem never writes them, and a few can expand to gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias, which is not read", self.peek_event().start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes texts that the loader would read as another type."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789nNiI"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}


def as_yaml(values: Mapping[str, Any]) -> str:
    """Settings as YAML."""
    return str(yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_settings(folder: Path) -> dict[str, Any]:
    """Every setting of a run's folder by its dotted key.

    Raises:
        FileError: `config.yaml` has invalid content. FileNotFoundError: there is no such file.
    """
    path = folder / "config.yaml"
    try:
        content = yaml.load(read_text(path, below=folder, limit=LARGEST), Loader=_Loader)
    except RecursionError:
        raise FileError(f"{path}: lists and mappings are too deep within each other") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise FileError(f"{path}{f', line {mark.line + 1}' if mark else ''}: not valid YAML ({problem})") from None
    return dict(_leaves(parsed(content, dict[str, Any], str(path)), ""))


def _leaves(section: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in section.items():
        leaves += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
    return leaves
