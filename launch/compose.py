"""From the command line to a checked `Config`. A DictConfig never leaves this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from tandem.platform.config import Config, ConfigError

CONF = "pkg://tandem.conf"


def compose(overrides: Sequence[str]) -> tuple[Config, set[str]]:
    """The configuration of a command line, and the keys that it sets by hand.

    Raises:
        ConfigError: an unknown key or group, also with `+` and `++`, or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_schema()
    given = check_overrides(overrides)
    chosen = {override.partition("=")[0] for override in overrides}
    if "model.path" in given and "model" not in chosen:
        # The embedded model's learning rates would ruin a real one.
        overrides = ["model=pretrained", *overrides]
    try:
        with initialize_config_module("tandem.conf", version_base="1.3"):
            composed = hydra_compose("config", overrides=[_as_hydra(override) for override in overrides])
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{', '.join(missing)}: must be set, for example {missing[0]}=...")
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    reward = config.reward
    if not reward.functions and reward.function is None and reward.model is None:
        reward.functions = {"exact_match": 1.0}
    return config, given


def register_schema() -> None:
    """Makes the dataclass schema known to Hydra, as the base of `conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def check_overrides(overrides: Sequence[str]) -> set[str]:
    """The dotted keys set by the overrides; refuses those that do not exist, whatever stands before them.

    Raises:
        ConfigError: with the nearest valid key.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"the command line cannot be read: {explain(error)}") from error
    groups, keys = config_groups(), setting_keys()
    given: set[str] = set()
    for override in parsed:
        key, value = override.key_or_group, override.value()
        if override.is_delete():
            raise ConfigError(f"{override.input_line}: settings cannot be deleted; give {key} another value")
        if key in groups and not isinstance(value, dict):
            _check_choice(key, value, groups)
            continue
        given |= _checked_leaves(key, value, keys, groups)
    return given


def _as_hydra(override: str) -> str:
    """An override of a free name in a dictionary, as Hydra wants it: with ++."""
    key = override.partition("=")[0]
    keys = setting_keys()
    return f"++{override}" if keys.get(key) or keys.get(key.rpartition(".")[0]) else override


def _check_choice(key: str, value: Any, groups: dict[str, list[str]]) -> None:
    if key in groups and isinstance(value, str) and value not in groups[key]:
        raise ConfigError(f"{key}={value}: there is {', '.join(groups[key])}{_nearest(value, groups[key])}")


def _checked_leaves(key: str, value: Any, keys: dict[str, bool], groups: dict[str, list[str]]) -> set[str]:
    """The leaf keys that one override sets: itself, or those of a dictionary given for a whole section."""
    if isinstance(value, dict) and any(known.startswith(key + ".") for known in keys):
        return {leaf for name, part in value.items() for leaf in _checked_leaves(f"{key}.{name}", part, keys, groups)}
    parent = key.rpartition(".")[0]
    if key in keys or keys.get(parent):  # keys[parent]: a dictionary with free names, as reward.functions
        return {key}
    raise ConfigError(f"{key}: no such setting{_nearest(key, [*keys, *groups])}")


def _nearest(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    leaf = word.rpartition(".")[2]
    same_name = [key for key in known if key.rpartition(".")[2] == leaf]
    found = (same_name or close)[:1]
    return f". Did you mean {found[0]}?" if found else ". `python launch/main.py --settings` lists all"


def setting_keys(cls: type = Config, prefix: str = "") -> dict[str, bool]:
    """Every leaf setting by dotted key; True where it is a dictionary with free names."""
    hints = get_type_hints(cls)
    keys: dict[str, bool] = {}
    for item in fields(cls):
        kind, key = hints[item.name], prefix + item.name
        if is_dataclass(kind):
            keys |= setting_keys(kind, key + ".")  # type: ignore[arg-type]
        else:
            keys[key] = getattr(kind, "__origin__", None) is dict
    return keys


def config_groups() -> dict[str, list[str]]:
    """Names of the YAML files in each folder of `conf/`."""
    import tandem.conf

    root = Path(tandem.conf.__file__).parent
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(root.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf say, in one line: the key first, then what is wrong with its value."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    noise = ("object_type=", "reference_type=", "full_key:", "See https://", "Set the env")
    text = " ".join(line for line in lines if not line.startswith(noise))
    return f"{key}: {text}" if key else text
