"""From the command line to a checked `Config`. A DictConfig never leaves this module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from tandem.launch.compose.command import as_called
from tandem.launch.compose.other_names import ours
from tandem.launch.compose.overrides import Typed, parse
from tandem.platform.config.schema import Config, ConfigError, settings
from tandem.platform.system.redact import redacted_values
from tandem.platform.system.text import did_you_mean

CONF = "pkg://tandem.conf"
OWN_CODE = (("", "adv_estimator"), ("algo", "policy_loss"), ("reward", "function"), ("eval", "function"))
"""Section and name of the settings that may be `path.py:name`."""


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
    refuse_options(overrides)
    overrides = [_with_home(override) for override in overrides]
    given = check_overrides(overrides)
    groups = config_groups()
    typed = [parse(override) for override in overrides]
    choices = [one.line for one in typed if _is_choice(one, groups)]
    if given.get("model.path") is not None and "model" not in given:
        # The embedded model's learning rates would ruin a real one.
        choices = ["model=pretrained", *choices]
    try:
        with initialize_config_module("tandem.conf", version_base="1.3"):
            composed = hydra_compose("config", overrides=choices)
        for one in typed:
            if not _is_choice(one, groups):  # Hydra would read texts as numbers
                _set(composed, one)
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{', '.join(missing)}: must be set, for example {missing[0]}=...")
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    if config.run.epochs is not None and "run.steps" not in given:
        config.run.steps = None  # the default gives way
    reward = config.reward
    if not reward.functions and reward.function is None and reward.model is None:
        reward.functions = {"exact_match": 1.0}
    _make_absolute(config)
    return config, given.keys() - config_groups().keys()


def _set(composed: Any, one: Typed) -> None:
    """Gives a setting its value.

    Raises:
        ConfigError: it has a `${` that begins no reference.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.update(composed, one.key, one.value, merge=True, force_add=True)
    except GrammarParseError as error:
        how = "${KEY} stands for another setting; as a text it is written \\${"
        raise ConfigError(f"{one.key}={one.value}: {how}") from error


def _make_absolute(config: Config) -> None:
    """Paths that exist here are made absolute: workers may start in another folder. Hub names stay."""
    for owner, name in ((config.model, "path"), (config.critic, "path"), (config.reward, "model")):
        path = getattr(owner, name)
        if path is not None and _exists(_absolute(path)):
            setattr(owner, name, str(_absolute(path)))
    for section, name in OWN_CODE:
        own: Any = getattr(config, section) if section else config
        path, colon, function = (getattr(own, name) or "").rpartition(":")
        if path:
            setattr(own, name, f"{_absolute(path)}{colon}{function}")


def _absolute(path: str) -> Path:
    with suppress(RuntimeError):  # ~USER, who is not there
        return Path(path).expanduser().absolute()
    return Path(path).absolute()


def _exists(path: Path) -> bool:
    with suppress(OSError, ValueError):  # too long, or with a zero: nothing can be there
        return path.exists()
    return False


def register_schema() -> None:
    """Makes the dataclass schema known to Hydra, as the base of `conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def refuse_options(overrides: Sequence[str]) -> None:
    """Refuses what is written as an option, as `--learning_rate=1e-6`.

    Raises:
        ConfigError: with the setting that it may stand for.
    """
    for line in overrides:
        if line.startswith("-"):
            name = line.split("=")[0].split()[0].lstrip("-")
            hint = name and (f". Write {name}=VALUE" if name in setting_keys() else _nearest(name, list(setting_keys())))
            raise ConfigError(f"{line}: no such option; settings are given as key=value, see --help{hint}")


def check_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The dotted keys and groups that the overrides set, with their values; refuses what does not exist, also with `+`.

    Raises:
        ConfigError: with the nearest valid key.
    """
    groups, keys = config_groups(), setting_keys()
    given: dict[str, Any] = {}
    for one in map(parse, overrides):
        key, line = one.key, one.line
        if one.prefix == "~":
            raise ConfigError(f"{line}: settings cannot be deleted; give {key} another value")
        if one.is_sweep:
            raise ConfigError(f"{line}: one value, please. Quote text with commas, {key}='a,b'; a list is {key}=[a,b]")
        if _is_choice(one, groups):
            _check_choice(line, key, one.value, groups[key])
            given[key] = one.value
        elif "@" in line.partition("=")[0]:
            raise ConfigError(f"{line}: only files of Hydra have a place after @; write {key}=VALUE")
        else:
            given |= _checked_leaves(key, one.value, keys, groups)
    return given


def _with_home(override: str) -> str:
    """`key=~/file` as `key=/home/me/file`: shells leave the tilde alone there, and Hydra reads it as a mistake."""
    return re.sub(r"(?<==)~(?=/)", str(Path.home()), override, count=1)


def _is_choice(one: Typed, groups: dict[str, list[str]]) -> bool:
    """Whether it names a file of a group, as `algo=grpo`."""
    return one.key in groups and not isinstance(one.value, dict)


def _check_choice(line: str, key: str, value: Any, choices: list[str]) -> None:
    if not line.startswith(f"{key}="):
        raise ConfigError(f"{line}: write {key}=NAME, with one of {', '.join(choices)}")
    if value not in choices:
        shown = "null" if value is None else value
        raise ConfigError(f"{key}={shown}: there is {', '.join(choices)}{_alike(str(value), choices)}")


def _checked_leaves(key: str, value: Any, keys: dict[str, bool], groups: dict[str, list[str]]) -> dict[str, Any]:
    """The leaf settings of one override: itself, or those of a dictionary given for a whole section."""
    inside = [known for known in keys if known.startswith(key + ".")]
    if isinstance(value, dict) and inside:
        parts = [_checked_leaves(f"{key}.{name}", part, keys, groups) for name, part in value.items()]
        return {leaf: own for part in parts for leaf, own in part.items()}
    if inside:
        raise ConfigError(f"{key}={value}: {key} is a section; set what is in it, as {inside[0]}=...")
    parent = key.rpartition(".")[0]
    if key in keys or keys.get(parent):  # keys[parent]: a dictionary with free names, as reward.functions
        return {key: value}
    raise ConfigError(f"{key}: no such setting{_nearest(key, [*keys, *groups])}")


def _nearest(word: str, known: Sequence[str]) -> str:
    if named := ours(word):
        return f". Here it is {named.ours}{f' ({named.note})' if named.note else ''}"
    return _alike(word, known) or as_called(". `python launch/main.py --settings` lists all")


def _alike(word: str, known: Sequence[str]) -> str:
    leaf = word.rpartition(".")[2]
    same_name = [key for key in known if key.rpartition(".")[2] == leaf]
    return f". Did you mean {same_name[0]}?" if same_name else did_you_mean(word, known, cutoff=0.5)


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


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, as JSON can hold it, without secrets."""
    return {key: redacted_values(value) for key, value, _ in settings(config)}


def config_groups() -> dict[str, list[str]]:
    """Names of the YAML files in each folder of `conf/` that is a section of the configuration."""
    import tandem.conf

    root = Path(tandem.conf.__file__).parent
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(root.iterdir())
        if folder.name in Config.__dataclass_fields__
    }


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf say, in one line: the key first, then what is wrong with its value."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    noise = ("object_type=", "reference_type=", "full_key:", "See https://", "Set the env")
    text = " ".join(line for line in lines if not line.startswith(noise))
    return f"{key}: {text}" if key else text
