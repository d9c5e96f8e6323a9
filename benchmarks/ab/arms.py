"""The arms of the benchmark and the controls: two arms may differ only in allowed settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tandem.launch.assembly.inputs import model_path
from tandem.launch.compose.compose import compose, explain, flat
from tandem.launch.compose.overrides import LONGEST_SHOWN, refuse_deep
from tandem.platform.algorithms.registry import ESTIMATORS, Algorithm, algorithm_of
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.planning.validate import validate
from tandem.platform.system.terminal import say
from tandem.platform.system.text import did_you_mean

CONFIG = "benchmark/critic_vs_group"
NOT_COMPARED = ("run.name", "run.dir")
OURS = ("run.seed", "run.name", "run.dir", "data.seed", "rollout.seed", "checkpoint.dir", "checkpoint.resume", "dry_run")
"""Settings that the benchmark sets for each run. A fixed value would, for example, override the seeds."""


@dataclass
class Definition:
    """The definition of an arm."""

    label: str
    algo: str
    group: int  # samples per prompt
    settings: dict[str, Any] = field(default_factory=dict)
    critic_model: dict[str, Any] = field(default_factory=dict)  # settings of the embedded model that the critic starts from
    critic_path: str | None = None  # its first weights, if the model is not the embedded one


@dataclass
class Plan:
    """The benchmark's settings: the keys of `conf/benchmark/critic_vs_group.yaml`."""

    out: str
    report: str | None
    completions: int
    seeds: list[int]
    skip_steps: int
    peak: bool
    settings: dict[str, Any]
    arms: list[str]
    definitions: dict[str, Definition]
    comparisons: list[list[str]]
    allowed: list[str]


@dataclass(frozen=True)
class Arm:
    """An arm that is ready to run."""

    name: str
    label: str
    overrides: tuple[str, ...]  # of `launch/main.py`; each run adds seed, name and folder
    config: Config
    model: str  # folder or hub name of the actor's first weights
    critic_model: str | None  # folder or hub name of the critic's first weights; None: there is no critic
    unread: frozenset[str]  # settings, or sections, that only other estimators read

    @property
    def settings(self) -> dict[str, Any]:
        """Every compared setting by its dotted key."""
        return {key: value for key, value in flat(self.config).items() if key not in NOT_COMPARED}

    def reads(self, key: str) -> bool:
        """Whether this arm uses the setting: an arm without a critic does not use `critic.lr`."""
        return not _is_in(key, self.unread)


def load_plan(arguments: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan of a command line, and the remaining arguments, which are settings of every run.

    Raises:
        ConfigError: an unknown arm, or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    keys = tuple(Plan.__dataclass_fields__)
    ours = [text for text in arguments if text.lstrip("+").partition("=")[0].partition(".")[0] in keys]
    rest = [text for text in arguments if text not in ours]
    for text in ours:
        refuse_deep(text)
    try:
        with initialize_config_module("tandem.conf", version_base="1.3"):
            composed = hydra_compose(CONFIG, overrides=[_as_hydra(text) for text in ours])
        plan = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plan), composed))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    except ValueError as error:  # a number with more digits than Python reads
        raise ConfigError(f"{' '.join(ours)[:LONGEST_SHOWN]}: cannot be read: {error}") from error
    assert isinstance(plan, Plan)
    for problem in _problems(plan, rest):
        raise ConfigError(problem)
    return plan, rest


def _problems(plan: Plan, given: Sequence[str]) -> Iterator[str]:
    for key, names in (("arms", plan.arms), ("comparisons", [name for pair in plan.comparisons for name in pair])):
        for name in names:
            if name not in plan.definitions:
                yield f"{key}: {name} is not defined{did_you_mean(name, plan.definitions)}"
    if any(len(pair) != 2 for pair in plan.comparisons):
        yield f"comparisons={plan.comparisons}: each is a pair of arms"
    if len(set(plan.arms)) < len(plan.arms) or len(set(plan.seeds)) < len(plan.seeds) or not plan.arms or not plan.seeds:
        yield f"arms={plan.arms} seeds={plan.seeds}: expected at least one of each, without repetition"
    for text in given:
        if (key := text.lstrip("+").partition("=")[0]) in OURS:
            yield f"{text}: the benchmark sets {key} for each run. Leave it out"
    labels = [plan.definitions[name].label for name in plan.arms]
    if len(set(labels)) < len(labels):
        yield f"arms={plan.arms}: two arms have the same label; set different definitions.NAME.label"


def make_arms(plan: Plan, given: Sequence[str]) -> list[Arm]:
    """The arms of a plan, checked against its controls; builds the embedded models that they start from.

    Raises:
        ConfigError: a setting cannot work, or two arms differ in a setting that is not allowed to differ.
    """
    arms = [_arm(plan, name, given) for name in plan.arms]
    check_controls(arms, plan.allowed)
    return arms


def check_controls(arms: Sequence[Arm], allowed: Collection[str]) -> None:
    """Refuses arms that differ in settings outside `allowed`, or in first weights.

    Raises:
        ConfigError: with the arms, the keys and both values.
    """
    wrong = []
    for one, other in combinations(arms, 2):
        for key, value in differing(one.settings, other.settings).items():
            if key not in allowed and one.reads(key) and other.reads(key):
                wrong.append(f"{key}: {one.name} has {value[0]}, {other.name} has {value[1]}")
        if one.model != other.model:
            wrong.append(f"first weights: {one.name} has {one.model}, {other.name} has {other.model}")
    if wrong:
        raise ConfigError(
            "two arms may differ only in the keys of `allowed` (conf/benchmark/critic_vs_group.yaml); otherwise the "
            "comparison says nothing about the critic:\n  "
            + "\n  ".join(wrong)
            + "\nSet them alike, or add a key to `allowed`"
        )


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, with both values."""
    keys = [*one, *(key for key in other if key not in one)]
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def _arm(plan: Plan, name: str, given: Sequence[str]) -> Arm:
    made = plan.definitions[name]
    if plan.completions % made.group:
        raise ConfigError(
            f"{name}: completions={plan.completions} samples per step are not a multiple of its group of {made.group}. "
            "Set completions to a multiple"
        )
    sizes = {"data.prompts_per_step": plan.completions // made.group, "rollout.samples_per_prompt": made.group}
    shared = [f"{key}={_text(value)}" for key, value in _shared(plan, given).items()]
    special = [f"{key}={_text(value)}" for key, value in {**sizes, **made.settings}.items()]
    unread = _unread(compose([f"algo={made.algo}", *special])[0])
    read = [text for text in given if not _is_in(text.lstrip("+").partition("=")[0], unread)]
    overrides = [f"algo={made.algo}", *shared, *read, *special]
    config, keys = compose(overrides)
    first = model_path(config, _silent)
    if made.critic_model or made.critic_path:
        path = made.critic_path or _small_critic(name, config, made, overrides)
        overrides.append(f"critic.path={_text(path)}")
        config, keys = compose(overrides)
    try:
        validate(config, keys)
    except ConfigError as error:
        raise ConfigError(f"arm {name}: {error}") from error
    critic = (config.critic.path or first) if _algorithm(config).needs_critic else None
    return Arm(name, made.label, tuple(overrides), config, first, critic, unread)


def _shared(plan: Plan, given: Sequence[str]) -> dict[str, Any]:
    """The plan's settings of every run that the command line does not override.

    Running all roles in one process is for the embedded model; with another model, or with a cluster, roles are Ray actors.
    """
    keys = {text.lstrip("+").partition("=")[0] for text in given}
    on_ray = "model.path" in keys or any(key.startswith("cluster.") for key in keys)
    return {key: value for key, value in plan.settings.items() if key not in keys and not (key == "cluster" and on_ray)}


def _algorithm(config: Config) -> Algorithm:
    return algorithm_of(config)


def _unread(config: Config) -> frozenset[str]:
    algorithm = _algorithm(config)
    others = {key for part in ESTIMATORS.values() for key in part.reads} - set(algorithm.estimator.reads)
    return frozenset(others | (set() if algorithm.needs_critic else {"critic"}))


def _is_in(key: str, names: Collection[str]) -> bool:
    """Whether a setting is one of `names`, or in a section among them."""
    return any(key == name or key.startswith(name + ".") for name in names)


def _as_hydra(text: str) -> str:
    """Lets an override add parts of a definition that are not in the YAML file."""
    return "++" + text.lstrip("+") if text.lstrip("+").startswith(("definitions.", "settings.")) else text


def _small_critic(name: str, config: Config, made: Definition, overrides: Sequence[str]) -> str:
    if config.model.path is not None:
        raise ConfigError(
            f"{name}: its critic starts from a smaller model than model.path={config.model.path}. Set "
            f"definitions.{name}.critic_path=FOLDER, of the same family, or leave it out of arms"
        )
    smaller, _ = compose([*overrides, *(f"{key}={_text(value)}" for key, value in made.critic_model.items())])
    return model_path(smaller, _silent)


def _silent(step: int, total: int) -> None:
    if step == 1:
        say(f"building an embedded model: {total} steps of supervised fine-tuning, once")


def _text(value: Any) -> str:
    """A value in the syntax of the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"'{value}'" if isinstance(value, str) else str(value)
