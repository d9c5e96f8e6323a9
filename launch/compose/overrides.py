"""Parses overrides of the command line, and keeps texts as typed.

Hydra reads `2024_01_05` as the number 20240105 and `12e4567` as infinity, whatever the type of the setting. Here the
declared type decides: text settings get the characters as typed, also within lists, dictionaries and sections, and so do
the names in a dictionary. Quotes are removed. An unquoted `null` is None for a single value. `${...}`, quoted or not, is a
reference to another setting, which OmegaConf resolves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from itertools import accumulate
from typing import Any, get_args, get_origin, get_type_hints

from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.system.readers import MAX_DEPTH


@dataclass(frozen=True)
class Typed:
    """One override. Example: `+run.name=007` is `Typed("+run.name=007", "run.name", "007", "+")`."""

    line: str
    key: str
    value: Any  # by the declared type of the key
    prefix: str
    is_sweep: bool = False


LONGEST_SHOWN = 300  # characters of an override in a message

_ITEM = object()  # the type of a text in a list or dictionary, where null is an ordinary text


@dataclass(frozen=True)
class _Text:
    """A value without brackets: as Hydra reads it, and as typed."""

    value: Any
    text: str


def parse(line: str) -> Typed:
    """Parses one argument.

    Raises:
        ConfigError: the argument is not an override.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    refuse_deep(line)
    try:
        parsed = OverridesParser.create().parse_override(line)
    except (HydraException, ValueError) as error:  # ValueError: a number of more digits than Python reads
        hint = "settings are given as key=value, and a value with special characters is quoted: key='a=b, c'"
        raise ConfigError(f"{line[:LONGEST_SHOWN]}: cannot be read; {hint}") from error
    prefix, key = line[: len(line) - len(line.lstrip("+~"))], parsed.key_or_group
    if parsed.is_delete() or parsed.is_sweep_override():
        return Typed(line, key, None, prefix, is_sweep=parsed.is_sweep_override())
    return Typed(line, key, as_declared(_texts(line), kind_of(key)), prefix)


def refuse_deep(line: str) -> None:
    """Refuses an override that would exceed the parser's recursion limit.

    Raises:
        ConfigError: its brackets are nested too deeply.
    """
    if max(accumulate((char in "[{(") - (char in "]})") for char in line), default=0) > MAX_DEPTH:
        raise ConfigError(f"{line[:LONGEST_SHOWN]}: brackets are more than {MAX_DEPTH} deep")


def kind_of(key: str) -> Any:
    """The declared type of a dotted key, or None."""
    kind: Any = Config
    for name in key.split("."):
        kind = _inside(kind, name)
    return kind


def as_declared(value: Any, kind: Any) -> Any:
    """Converts a value made of `_Text`, lists and dictionaries; keeps characters as typed where the type is a text."""
    if isinstance(value, _Text):
        is_text = kind is _ITEM or (value.value is not None and (kind is str or str in get_args(kind)))
        return value.text if is_text else value.value
    if isinstance(value, list):
        return [as_declared(item, _item_of(kind) if get_origin(kind) is list else None) for item in value]
    if isinstance(value, Mapping):
        return {name: as_declared(item, _inside(kind, name)) for name, item in value.items()}
    return value


def _inside(kind: Any, name: str) -> Any:
    """The declared type of a name in a section, or in a dictionary with free names."""
    if isinstance(kind, type) and is_dataclass(kind):
        return get_type_hints(kind).get(name)
    return _item_of(kind) if get_origin(kind) is dict else None


def _item_of(kind: Any) -> Any:
    item = get_args(kind)[-1]
    return _ITEM if item is str else item


def _texts(line: str) -> Any:
    """The value of a valid override, with the characters of each part as typed."""
    from antlr4 import CommonTokenStream, InputStream
    from hydra.core.override_parser.overrides_parser import create_functions
    from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
    from hydra.core.override_parser.types import QuotedString
    from hydra.grammar.gen.OverrideLexer import OverrideLexer
    from hydra.grammar.gen.OverrideParser import OverrideParser

    class Visitor(HydraOverrideVisitor):
        in_function = False

        def visitFunction(self, ctx: Any) -> Any:
            self.in_function = True  # Hydra parses the arguments of functions
            value = super().visitFunction(ctx)
            self.in_function = False
            return _Text(value, str(value)) if not isinstance(value, list | dict) else value

        def visitDictKey(self, ctx: Any) -> str:
            return self._createPrimitive(ctx).text

        def _createPrimitive(self, ctx: Any) -> Any:
            value = super()._createPrimitive(ctx)
            if self.in_function:
                return value
            if isinstance(value, QuotedString):
                return _Text(value.text, value.text)
            return _Text(value, value if isinstance(value, str) else ctx.getText().strip())

    tokens = CommonTokenStream(OverrideLexer(InputStream(line)))
    return Visitor(create_functions()).visit(OverrideParser(tokens).override()).value()
