"""The command line: the resulting configuration, and the messages for mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import tandem.conf
from tandem.launch.assembly.folder import settings_yaml
from tandem.launch.compose.compose import check_overrides, compose, config_groups, flat, setting_keys
from tandem.launch.compose.other_names import names
from tandem.launch.views.run import read
from tandem.platform.config.schema import Config, ConfigError, each_setting
from tandem.platform.planning.validate import validate

ALGOS = "cispo, dapo, dr_grpo, grpo, gspo, opo, ppo, reinforce, reinforce_pp, reinforce_pp_baseline, remax, rloo, vapo"


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def test_defaults() -> None:
    config, given = compose([])
    assert given == set()
    assert isinstance(config, Config)
    assert (config.adv_estimator, config.algo.name, config.model.name) == ("gae", "ppo", "tiny")
    assert config.reward.functions == {"exact_match": 1.0}
    assert validate(config, given) == []


def test_algo_sets_the_estimator_and_its_numbers() -> None:
    config, given = compose(["algo=grpo"])
    assert (config.adv_estimator, config.algo.name) == ("grpo", "grpo")
    assert validate(config, given) == []


def test_estimator_alone_changes_only_the_estimator() -> None:
    config, given = compose(["adv_estimator=grpo"])
    assert (config.adv_estimator, config.algo.name) == ("grpo", "ppo")
    assert given == {"adv_estimator"}
    assert validate(config, given) == []


@pytest.mark.parametrize("choice", ["algo=grpo", "adv_estimator=grpo"])
@pytest.mark.parametrize("critic", ["critic.lr=1e-3", "critic={lr: 1e-3}", "++critic.lr=1e-3"])
def test_critic_setting_without_a_critic_is_refused(choice: str, critic: str) -> None:
    config, given = compose([choice, critic])
    with pytest.raises(ConfigError, match=r"critic.lr is set, but adv_estimator=grpo does not read it"):
        validate(config, given)


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_mistyped_key_is_refused_whatever_stands_before_it(prefix: str) -> None:
    text = refused(f"{prefix}algo.clip_ratio_hgih=.3")
    assert text == "algo.clip_ratio_hgih: no such setting. Did you mean algo.clip_ratio_high?"


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("modle=tiny", "modle: no such setting. Did you mean model?"),
        ("run={stps: 3}", "run.stps: no such setting. Did you mean run.steps?"),
        ("model={tiny: {layer: 3}}", "model.tiny.layer: no such setting. Did you mean model.tiny.layers?"),
        ("hydra.run.dir=x", "hydra.run.dir: no such setting"),
        ("reward.functions.exact_match.x=1", "reward.functions.exact_match.x: no such setting"),
        ("+zzz=1", "zzz: no such setting. `python launch/main.py --settings` lists all"),
        ("algo=grpoo", f"algo=grpoo: expected one of {ALGOS}. Did you mean grpo?"),
        ("algo=null", f"algo=null: expected one of {ALGOS}"),
        ("algo=[ppo,grpo]", f"algo=['ppo', 'grpo']: expected one of {ALGOS}"),
        ("algo=3", f"algo=3: expected one of {ALGOS}"),
        ("algo=ppo,grpo", "algo=ppo,grpo: expected one value"),
        ("+algo=grpo", f"+algo=grpo: write algo=NAME, with one of {ALGOS}"),
        ("++algo=grpo", "++algo=grpo: write algo=NAME"),
        ("algo@x=grpo", "algo@x=grpo: write algo=NAME"),
        ("run.name@x=a", "run.name@x=a: @ is only allowed in Hydra files; write run.name=VALUE"),
        ("+run@run.x={name: a}", "+run@run.x={name: a}: @ is only allowed in Hydra files"),
        ("~algo", "~algo: settings cannot be deleted; give algo another value"),
        ("~run.name", "~run.name: settings cannot be deleted; give run.name another value"),
        ("critic=null", "critic=None: critic is a section; set its settings, for example critic.lr=..."),
        ("run=3", "run=3: run is a section; set its settings, for example run.name=..."),
        ("run.name=a,b", "run.name=a,b: expected one value. Quote text with commas, run.name='a,b'"),
        ("run.seed=range(1,3)", "run.seed=range(1,3): expected one value"),
        ("data.train=a=b.jsonl", "data.train=a=b.jsonl: cannot be read; settings are given as key=value"),
        ("foo", "foo: cannot be read; settings are given as key=value"),
        ("'run.seed'=3", "'run.seed'=3: cannot be read"),
    ],
)
def test_refused_before_hydra_composes(override: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_overrides([override])
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("run.steps=two", "run.steps: Value 'two' of type 'str' could not be converted to Integer"),
        ("run.steps=1.5", "run.steps: Value '1.5' of type 'float' could not be converted to Integer"),
        ("run.seed=true", "run.seed: Value 'True' of type 'bool' could not be converted to Integer"),
        ("actor.lr=abc", "actor.lr: Value 'abc' of type 'str' could not be converted to Float"),
        ("dry_run=ture", "dry_run: Value 'ture' is not a valid bool"),
        ("model.dtype=null", "model.dtype: field 'model.dtype' is not Optional"),
        ("reward.functions.exact_match=abc", "reward.functions.exact_match: Value 'abc'"),
        ("rollout.stop_token_ids=[a]", "rollout.stop_token_ids[0]: Value 'a'"),
        ("run.name=???", "run.name: must be set"),
        ("run.name=${nope}", "run.name: Interpolation key 'nope' not found"),
    ],
)
def test_value_of_the_wrong_type(override: str, text: str) -> None:
    found = refused(override)
    assert found.startswith(text)
    assert "\n" not in found


def test_given_keys() -> None:
    overrides = ["algo=grpo", "run={steps: 3, seed: 2}", "++actor.lr=1", "reward.functions.boxed=2", "run.name=null"]
    assert check_overrides(overrides) == {
        "algo": "grpo",
        "run.steps": 3,
        "run.seed": 2,
        "actor.lr": 1,
        "reward.functions.boxed": 2,
        "run.name": None,
    }


def test_values_reach_the_configuration() -> None:
    config, given = compose(
        [
            "run.name='a,b'",
            "run={seed: 2, steps: 9}",
            "run.dir=my runs",
            "++actor.lr=0.5",
            "algo.dual_clip=null",
            "rollout.stop_token_ids=[1,2]",
            "model.tiny={layers: 2}",
            "placement=split",
        ]
    )
    assert (config.run.name, config.run.seed, config.run.dir, config.run.steps) == ("a,b", 2, "my runs", 9)
    assert (config.actor.lr, config.algo.dual_clip, config.rollout.stop_token_ids) == (0.5, None, [1, 2])
    assert (config.model.tiny.layers, config.model.tiny.heads) == (2, 4)
    assert config.placement.name == "split"
    assert "placement" not in given
    assert {"run.name", "run.seed", "actor.lr", "model.tiny.layers"} <= given


@pytest.mark.parametrize(
    "override",
    [
        "reward.functions.boxed=2",
        "+reward.functions.boxed=2",
        "++reward.functions.boxed=2",
        "reward.functions={boxed: 2}",
        "reward={functions: {boxed: 2}}",
    ],
)
def test_reward_functions_are_named_freely(override: str) -> None:
    config, _ = compose([override])
    assert config.reward.functions == {"boxed": 2.0}


def test_another_reward_takes_the_place_of_the_default() -> None:
    assert compose(["reward.function=my.py:score"])[0].reward.functions == {}
    assert compose(["reward.model=/m"])[0].reward.functions == {}


@pytest.mark.parametrize("override", ["model.path=/m", "model={path: /m}"])
def test_a_path_selects_the_pretrained_model_and_its_rates(override: str) -> None:
    config, _ = compose([override])
    assert (config.model.name, config.model.path) == ("pretrained", "/m")
    assert config.actor.lr == 1e-6
    assert compose([])[0].actor.lr == 1e-4


def test_no_path_selects_nothing() -> None:
    assert compose(["model.path=null"])[0].model.name == "tiny"


def test_a_model_given_by_hand_is_not_replaced() -> None:
    config, given = compose(["model=tiny", "model.path=/m"])
    with pytest.raises(ConfigError, match="model=tiny is the embedded model"):
        validate(config, given)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert compose(["data.train=~/a.jsonl"])[0].data.train == "/home/me/a.jsonl"
    assert compose(["run.name='a~/b'"])[0].run.name == "a~/b"


def test_epochs_take_the_place_of_the_default_steps() -> None:
    config, given = compose(["run.epochs=2"])
    assert (config.run.steps, config.run.epochs) == (None, 2.0)
    assert validate(config, given) == []


def test_steps_and_epochs_both_by_hand_are_refused() -> None:
    config, given = compose(["run.epochs=2", "run.steps=10"])
    with pytest.raises(ConfigError, match=r"run.steps=10 steps and run.epochs=2.0 epochs: set exactly one"):
        validate(config, given)


def test_every_choice_of_every_group_composes_and_passes() -> None:
    for group, choices in config_groups().items():
        for name in choices:
            overrides = [f"{group}={name}"] + (["model.path=/m"] if name == "pretrained" else [])
            config, given = compose(overrides)
            assert validate(config, given) == [], overrides
            assert given <= {"model.path"}


def test_the_yaml_files_set_only_what_is_declared() -> None:
    """Hydra checks the files against the schema; this test checks that none of them names a class to instantiate."""
    for path in Path(tandem.conf.__file__).parent.rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path


def test_keys_of_the_schema() -> None:
    keys = setting_keys()
    assert list(keys) == [key for key, _, _ in each_setting(Config())]
    assert [key for key, free in keys.items() if free] == ["data.eval_sets", "reward.functions"]


TYPED_TEXTS = [
    *("2024_01_05", "12e4567", "2.10", "1_000", "007", "1e3", "0", "-0", "+5", "1.", ".5", "inf", "NaN", "true", "False"),
    *("on", "0x1F", "1e400", "2024-01-05", "12:30", "1-2", "a b", "x@y", "1_0.5", "00", "1e5e5", "a.b", "_"),
]


@pytest.mark.parametrize("text", TYPED_TEXTS)
def test_a_text_is_what_is_typed(text: str, tmp_path: Path) -> None:
    for prefix in ("", "+", "++"):
        assert compose([f"{prefix}run.name={text}"])[0].run.name == text
    config, given = compose(
        [f"run={{name: {text}, dir: {text}, steps: 3}}", f"algo.paper={text}", f"tracking.project='{text}'"]
    )
    assert (config.run.name, config.run.dir, config.algo.paper, config.tracking.project) == (text, text, text, text)
    assert config.run.steps == 3
    assert {"run.name", "run.dir", "run.steps", "algo.paper"} <= given
    folder = tmp_path / text
    folder.mkdir()
    (folder / "config.yaml").write_text(settings_yaml(config))
    assert read(folder).settings["run.name"] == text
    assert json.loads(json.dumps(flat(config)))["run.name"] == text


@pytest.mark.parametrize("text", [text for text in TYPED_TEXTS if ":" not in text])
def test_texts_in_lists_and_dictionaries_are_what_is_typed(text: str) -> None:
    overrides = [f"tracking.tags=[{text},'{text}',null]", f"++rollout={{stop: [{text}]}}", f"data.eval_sets={{a: {text}}}"]
    config, _ = compose([*overrides, f"data.eval_sets.b={text}", f"+data={{eval_sets: {{{text}: {text}}}}}"])
    assert config.tracking.tags == [text, text, "null"]
    assert config.rollout.stop == [text]
    assert config.data.eval_sets == {"a": text, "b": text, text: text}
    assert compose([f"reward.functions={{{text}: 1e0}}"])[0].reward.functions == {text: 1.0}


def test_null_is_missing_unless_it_is_quoted() -> None:
    assert compose(["run.name=null"])[0].run.name is None
    assert compose(["run={name: NULL}"])[0].run.name is None
    assert compose(["run.name='null'"])[0].run.name == "null"
    assert compose(["data.eval_sets={a: null}"])[0].data.eval_sets == {"a": "null"}
    assert compose(["run.name="])[0].run.name == ""


def test_numbers_stay_numbers() -> None:
    config, given = compose(
        ["run.steps=1_000", "actor.lr=1e-3", "rollout.stop_token_ids=[1,2_0]", "dry_run=TRUE", "reward.clip=5"]
    )
    assert (config.run.steps, config.actor.lr, config.rollout.stop_token_ids, config.dry_run) == (1000, 1e-3, [1, 20], True)
    assert config.reward.clip == 5.0
    assert "dry_run" in given


def test_a_reference_is_another_setting() -> None:
    assert compose(["run.name=2024_01_05", "tracking.project=${run.name}"])[0].tracking.project == "2024_01_05"


def test_a_dictionary_of_numbers_names_its_functions_as_typed() -> None:
    config, _ = compose(["reward.functions={1e3: 1.0, 2.10: 2}"])
    assert config.reward.functions == {"1e3": 1.0, "2.10": 2.0}


CONF = Path(tandem.conf.__file__).parent
FILES = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if path.parent.name in config_groups())


def said_by(choice: str) -> dict[str, Any]:
    """The settings in a choice's file, by dotted key."""
    group, _, name = choice.partition("=")
    path = CONF / group / f"{name}.yaml"
    content = OmegaConf.to_container(OmegaConf.load(path)) or {}
    assert isinstance(content, dict)
    content = content if "# @package _global_" in path.read_text() else {group: content}
    return dict(leaves(content))


def leaves(section: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("choice", FILES)
def test_what_a_file_of_a_group_says_holds(choice: str) -> None:
    """No default is applied later and overrides a value from the file of a group."""
    config, _ = compose([choice, *(["model.path=base"] if choice == "model=pretrained" else [])])
    composed = {key: value for key, value, _ in each_setting(config)}
    told = said_by(choice)
    assert told
    assert {key: composed[key] for key in told} == told


def test_no_setting_is_said_by_two_groups() -> None:
    """If two groups set the same setting, its value would depend on the order of the groups."""
    groups: dict[str, set[str]] = {}
    for choice in FILES:
        for key in said_by(choice):
            groups.setdefault(key, set()).add(choice.partition("=")[0])
    assert {key: found for key, found in groups.items() if len(found) > 1} == {}


def test_a_real_model_has_room_for_real_prompts() -> None:
    config, _ = compose(["model.path=base"])
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (512, 512)
    config, _ = compose(["model.path=base", "data.max_prompt_tokens=77"])
    assert config.data.max_prompt_tokens == 77


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("learning_rate=1e-6", "learning_rate: no such setting. Here it is actor.lr"),
        ("actor_rollout_ref.rollout.n=4", "Here it is rollout.samples_per_prompt"),
        ("rollout.n=4", "Here it is rollout.samples_per_prompt"),
        ("lr=1", "Here it is actor.lr"),
        ("--num_generations=8", "no such option; settings are given as key=value, see --help. Here it is rollout.samples"),
        ("--run.name=a", "see --help. Write run.name=VALUE"),
        ("beta=0.04", "Here it is algo.kl_loss_coef (0 is off"),
    ],
)
def test_names_of_other_frameworks_are_translated(typed: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([typed])
    assert said in str(caught.value)


def test_names_of_other_frameworks_stand_for_what_exists() -> None:
    known = {*setting_keys(), *config_groups()}
    assert [one.ours for one in names() if one.ours not in known] == []
    assert len({one.ours for one in names()}) == len(names())
    full = [name for one in names() for name in one.verl]
    assert len(set(full)) == len(full)
    assert not known & {name for one in names() for name in (*one.trl, *one.openrlhf)}
