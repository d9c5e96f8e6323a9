"""Turns the command line into a checked `Config`. A DictConfig never leaves this module."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from tandem.launch.compose.command import as_called
from tandem.launch.compose.other_names import ours
from tandem.launch.compose.overrides import Typed, parse
from tandem.platform.config.schema import GROUP, Config, ConfigError, each_setting
from tandem.platform.data.tasks import TASKS
from tandem.platform.system.redact import redacted_values
from tandem.platform.system.text import did_you_mean

CONF = "pkg://tandem.conf"
OWN_CODE = (("", "adv_estimator"), ("algo", "policy_loss"), ("reward", "function"), ("eval", "function"))
"""Section and name of the settings that accept `path.py:name`."""


def compose(overrides: Sequence[str]) -> tuple[Config, set[str]]:
    """The configuration of a command line, and the keys that it sets explicitly.

    Raises:
        ConfigError: an unknown key or group, even with `+` or `++`, or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_schema()
    refuse_options(overrides)
    overrides = [_with_home(override) for override in overrides]
    explicit = check_overrides(overrides)
    groups = config_groups()
    typed = [_automatic(parse(override)) for override in overrides]
    choices = [override.line for override in typed if _is_choice(override, groups)]
    if explicit.get("model.path") is not None and "model" not in explicit:
        # The embedded model's learning rates are too high for a pretrained model.
        choices = ["model=pretrained", *choices]
    try:
        with initialize_config_module("tandem.conf", version_base="1.3"):
            composed = hydra_compose("config", overrides=choices)
        for override in typed:
            if not _is_choice(override, groups):  # not set by Hydra, which would read some texts as numbers
                _set(composed, override)
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{', '.join(missing)}: must be set, for example {missing[0]}=...")
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    if config.run.epochs is not None and "run.steps" not in explicit:
        config.run.steps = None  # run.epochs replaces the default
    _settle_batch(config)
    _settle_by_task(config, explicit.keys())
    _make_absolute(config)
    return config, explicit.keys() - config_groups().keys()


def _automatic(one: Typed) -> Typed:
    """`auto` as null, for the setting whose null is called so."""
    return replace(one, value=None) if (one.key, one.value) == ("rollout.samples_per_prompt", "auto") else one


def _set(composed: Any, one: Typed) -> None:
    """Sets the value of one override.

    Raises:
        ConfigError: the value has a `${` that does not begin a reference.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.update(composed, one.key, one.value, merge=True, force_add=True)
    except GrammarParseError as error:
        how = "${KEY} refers to another setting; as a text it is written \\${"
        raise ConfigError(f"{one.key}={one.value}: {how}") from error


def _settle_batch(config: Config) -> None:
    """Fills in the samples of a prompt, by what the estimator compares, and the prompts of a step.

    Raises:
        ConfigError: the samples of a step are not a multiple of the samples of a prompt.
    """
    data, rollout = config.data, config.rollout
    if rollout.samples_per_prompt is None:
        rollout.samples_per_prompt = GROUP if _compares_samples(config) else 1
    if data.prompts_per_step is None:
        prompts, rest = divmod(data.samples_per_step, rollout.samples_per_prompt)
        if rest or not prompts:
            raise ConfigError(
                f"data.samples_per_step={data.samples_per_step} is not a multiple of rollout.samples_per_prompt="
                f"{rollout.samples_per_prompt}. Set data.samples_per_step="
                f"{max(prompts, 1) * rollout.samples_per_prompt}, or data.prompts_per_step"
            )
        data.prompts_per_step = prompts


def _compares_samples(config: Config) -> bool:
    """Whether the estimator or dynamic sampling compares the samples of a prompt; `validate` reports unknown estimators."""
    from tandem.platform.algorithms.registry import estimator_of  # imports torch, which mistakes should not wait for

    with suppress(ConfigError):
        return estimator_of(config.adv_estimator).min_group > 1 or config.algo.dynamic_sampling
    return True


def _settle_by_task(config: Config, explicit: Collection[str]) -> None:
    """Sets the reward and the longest response, unless they are chosen, to what the embedded task needs."""
    task, reward = TASKS.get(config.task.name), config.reward
    embedded = task if config.data.train is None else None
    if not reward.functions and reward.function is None and reward.model is None:
        reward.functions = {embedded.reward if embedded else "exact_match": 1.0}
    if task and config.model.path is None and "rollout.max_response_tokens" not in explicit:
        config.rollout.max_response_tokens = task.response_tokens(config.task)


def _make_absolute(config: Config) -> None:
    """Makes existing paths absolute, since workers may start in another folder. Hub names stay unchanged."""
    for part, name in ((config.model, "path"), (config.critic, "path"), (config.reward, "model")):
        path = getattr(part, name)
        if path is not None and _exists(_absolute(path)):
            setattr(part, name, str(_absolute(path)))
    for section, name in OWN_CODE:
        owner: Any = getattr(config, section) if section else config
        path, colon, function = (getattr(owner, name) or "").rpartition(":")
        if path:
            setattr(owner, name, f"{_absolute(path)}{colon}{function}")


def _absolute(path: str) -> Path:
    with suppress(RuntimeError):  # ~USER of an unknown user
        return Path(path).expanduser().absolute()
    return Path(path).absolute()


def _exists(path: Path) -> bool:
    with suppress(OSError, ValueError):  # too long or with a null byte, so it cannot exist
        return path.exists()
    return False


def register_schema() -> None:
    """Registers the dataclass schema with Hydra, as the base of `conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def refuse_options(overrides: Sequence[str]) -> None:
    """Refuses arguments that are written as options, such as `--learning_rate=1e-6`.

    Raises:
        ConfigError: suggests the setting that is probably meant.
    """
    for line in overrides:
        if line.startswith("-"):
            name = line.split("=")[0].split()[0].lstrip("-")
            hint = name and (f". Write {name}=VALUE" if name in setting_keys() else _nearest(name, list(setting_keys())))
            raise ConfigError(f"{line}: no such option; settings are given as key=value, see --help{hint}")


def check_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The dotted keys and groups that the overrides set, with their values.

    Raises:
        ConfigError: a key does not exist, even with `+`; suggests the nearest valid key.
    """
    groups, keys = config_groups(), setting_keys()
    values: dict[str, Any] = {}
    for override in map(parse, overrides):
        key, line = override.key, override.line
        if override.prefix == "~":
            raise ConfigError(f"{line}: settings cannot be deleted; give {key} another value")
        if override.is_sweep:
            raise ConfigError(f"{line}: expected one value. Quote text with commas, {key}='a,b'; a list is {key}=[a,b]")
        if _is_choice(override, groups):
            _check_choice(line, key, override.value, groups[key])
            values[key] = override.value
        elif "@" in line.partition("=")[0]:
            raise ConfigError(f"{line}: @ is only allowed in Hydra files; write {key}=VALUE")
        else:
            values |= _checked_leaves(key, override.value, keys, groups)
    return values


def _with_home(override: str) -> str:
    """`key=~/file` as `key=/home/me/file`: shells do not expand this tilde, and Hydra reads it as an error."""
    return re.sub(r"(?<==)~(?=/)", str(Path.home()), override, count=1)


def _is_choice(one: Typed, groups: dict[str, list[str]]) -> bool:
    """Whether an override selects a file of a group, such as `algo=grpo`."""
    return one.key in groups and not isinstance(one.value, dict)


def _check_choice(line: str, key: str, value: Any, choices: list[str]) -> None:
    if not line.startswith(f"{key}="):
        raise ConfigError(f"{line}: write {key}=NAME, with one of {', '.join(choices)}")
    if value not in choices:
        shown = "null" if value is None else value
        raise ConfigError(f"{key}={shown}: expected one of {', '.join(choices)}{_alike(str(value), choices)}")


def _checked_leaves(key: str, value: Any, keys: dict[str, bool], groups: dict[str, list[str]]) -> dict[str, Any]:
    """The leaf settings of one override: the key itself, or those in a dictionary for a whole section."""
    inside = [known for known in keys if known.startswith(key + ".")]
    if isinstance(value, dict) and inside:
        parts = [_checked_leaves(f"{key}.{name}", part, keys, groups) for name, part in value.items()]
        return {leaf: leaf_value for part in parts for leaf, leaf_value in part.items()}
    if inside:
        raise ConfigError(f"{key}={value}: {key} is a section; set its settings, for example {inside[0]}=...")
    parent = key.rpartition(".")[0]
    if key in keys or keys.get(parent):  # keys[parent]: a dictionary with free names, such as reward.functions
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
    """Every leaf setting by dotted key; True for a dictionary with free names."""
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
    """Every setting by dotted key, in a form that JSON can hold, without secrets."""
    return {key: redacted_values(value) for key, value, _ in each_setting(config)}


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
    """The message of a Hydra or OmegaConf error in one line: the key, then the problem with its value."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    noise = ("object_type=", "reference_type=", "full_key:", "See https://", "Set the env")
    text = " ".join(line for line in lines if not line.startswith(noise))
    return f"{key}: {text}" if key else text
