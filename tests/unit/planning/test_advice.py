"""All advice in messages about settings works: the changed settings are accepted, and the message disappears."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

import pytest

from tandem.launch.compose.compose import compose
from tandem.platform.config.schema import ConfigError
from tandem.platform.loop.alarms import alarms
from tandem.platform.planning import validate as relations
from tandem.platform.planning import validate_algo as algo_relations
from tandem.platform.planning.validate import validate

CRITIC = "critic.path=base"
CASES: list[tuple[list[str], list[list[str]]]] = [
    (["algo=grpo", "rollout.samples_per_prompt=1"], [["rollout.samples_per_prompt=2"], ["adv_estimator=gae"]]),
    (["train.minibatches=3"], [["train.minibatches=2"], ["train.minibatches=4"]]),
    (
        ["data.prompts_per_step=2", "rollout.samples_per_prompt=2", "actor.ranks=5", "train.minibatches=2"],
        [["actor.ranks=2"], ["data.prompts_per_step=8"]],
    ),
    (["data.prompts_per_step=2", "rollout.replicas=3"], [["rollout.replicas=2"]]),
    (["train.max_tokens_per_microbatch=50"], [["train.max_tokens_per_microbatch=72"]]),
    (
        ["train.gradient_noise_every=1", "trainer.zero_stage=3"],
        [["trainer.zero_stage=2"], ["train.gradient_noise_every=0"], ["trainer.zero_stage=0"]],
    ),
    (["checkpoint.keep_best=1", "eval.every=4", "checkpoint.every=6"], [["checkpoint.every=8"]]),
    (["tracking.sinks=[tensorbord]"], [["tracking.sinks=[tensorboard]"]]),
    (["model=tiny", "model.path=base"], [["model=pretrained"]]),
    (["model=pretrained"], [["model.path=base"]]),
    (["rollout.max_model_tokens=50"], [["rollout.max_model_tokens=72"], ["rollout.max_model_tokens=null"]]),
    (
        ["rollout.tensor_parallel=2", "rollout.engine=hf", "placement=split"],
        [["rollout.engine=vllm"], ["rollout.tensor_parallel=1"]],
    ),
    (["rollout.tensor_parallel=2", "rollout.engine=vllm"], [["placement=split"]]),
    (["cluster=inline", "cluster.address=1.2.3.4:5"], [["cluster.address=null"], ["cluster=local"]]),
    (["cluster=inline", "actor.ranks=2"], [["actor.ranks=1"], ["cluster=local"]]),
    (["critic.warmup_steps=20", "run.steps=10"], [["critic.warmup_steps=5"], ["run.steps=30"]]),
    (["run.steps=3", "run.epochs=1"], [["run.steps=null"], ["run.epochs=null"]]),
    (["reward.functions={exact_match: 0}"], [["reward.functions.exact_match=1"]]),
    (
        ["algo.kl_loss_coef=0.1", "algo.kl_loss_estimator=k1"],
        [["algo.kl_loss_estimator=k2"], ["algo.kl_loss_estimator=k3"], ["algo.kl_loss_gradient=k2"]],
    ),
    (
        ["algo.kl_loss_coef=0.1", "algo.kl_loss_gradient=k1"],
        [["algo.kl_loss_gradient=k2"], ["algo.kl_loss_gradient=k3"]],
    ),
    (
        ["algo.lam_policy=0.5", "algo.lam_length_alpha=0.1"],
        [["algo.lam_policy=null"], ["algo.lam_length_alpha=null"]],
    ),
    (["algo.kl_target=0.1"], [["algo.kl_reward_coef=0.01"]]),
    (["algo.correction=mask", "algo.correction_min=3"], [["algo.correction_min=0.1"]]),
    (
        ["algo.correction=truncate", "rollout.top_p=0.9", "rollout.top_k=5"],
        [["rollout.top_p=1", "rollout.top_k=null"], ["algo.correction=none"]],
    ),
    (
        ["algo.dynamic_sampling=true", "rollout.samples_per_prompt=1"],
        [["rollout.samples_per_prompt=2"], ["algo.dynamic_sampling=false"]],
    ),
    (
        ["reward.overlong_penalty=1", "reward.overlong_buffer_tokens=50"],
        [["reward.overlong_buffer_tokens=8"]],
    ),
    (["reward.overlong_penalty=1", "reward.overlong_buffer_tokens=0"], [["reward.overlong_buffer_tokens=1"]]),
    (["critic.head=score"], [[CRITIC]]),
    (["rollout.max_staleness=1"], [["algo.correction=truncate"]]),
    (
        ["rollout.max_staleness=1", "rollout.top_p=0.9"],
        [["rollout.top_p=1", "algo.correction=truncate"]],
    ),
    (
        ["algo=dapo", "algo.dynamic_surplus=keep", "rollout.top_k=4"],
        [["rollout.top_k=null", "algo.correction=truncate"]],
    ),
    (["actor.lr_min_ratio=0.1"], [["actor.lr_min_ratio=0.1", "actor.lr_schedule=linear"]]),
    (
        ["actor.lr_schedule=cosine", "actor.lr_decay_fraction=0.2"],
        [["actor.lr_decay_fraction=0.2", "actor.lr_schedule=wsd"]],
    ),
    (["run.steps=5", "actor.lr_schedule=cosine", "actor.lr_warmup_steps=5"], [["actor.lr_warmup_steps=4"]]),
    (["algo.kl_stop=0.1"], [["train.epochs_per_batch=2"]]),
]
"""What is set, and each way out: settings that replace those of the same name."""
NAMES = [" ".join(overrides) for overrides, _ in CASES]


def messages(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(errors, warnings) of a command line."""
    try:
        config, given = compose(list(overrides))
        return [], validate(config, given)
    except ConfigError as error:
        return str(error).splitlines(), []


def followed(overrides: Sequence[str], advice: Sequence[str]) -> list[str]:
    """The command line with the advised settings applied."""
    names = {one.partition("=")[0] for one in advice}
    return [one for one in overrides if one.partition("=")[0] not in names] + list(advice)


def kind(message: str) -> str:
    """A message without its numbers and values, to recognise messages of the same kind."""
    return re.sub(r"[\d.]+|=\S+", "", message)[:60]


@pytest.mark.parametrize(("overrides", "ways"), CASES, ids=NAMES)
def test_advice_is_accepted_and_ends_the_message(overrides: list[str], ways: list[list[str]]) -> None:
    errors, warnings = messages(overrides)
    [message] = errors or [text for text in warnings if not _of_the_settings_themselves(text)]
    for way in ways:
        errors, warnings = messages(followed(overrides, way))
        assert errors == [], way
        assert kind(message) not in map(kind, warnings)


def _of_the_settings_themselves(text: str) -> bool:
    """Whether this is the warning about top_p and top_k, which appears with any other settings."""
    return "truncate the sampling distribution" in text


@pytest.mark.parametrize(("overrides", "ways"), CASES, ids=NAMES)
def test_the_message_names_its_ways_out(overrides: list[str], ways: list[list[str]]) -> None:
    """A message advises only settings (`key=value`) that the case above tries."""
    errors, warnings = messages(overrides)
    [message] = errors or [text for text in warnings if not _of_the_settings_themselves(text)]
    told = re.findall(r"(?<![\w.])((?:[a-z_]+\.)+[a-z_]+|adv_estimator|placement|cluster)=([\w.]*\w)", _advice(message))
    tried = {one for way in ways for one in way}
    assert {f"{key}={value}" for key, value in told if value != "path.py"} <= tried, message


def _advice(message: str) -> str:
    """The part of a message that says what to do."""
    found = re.search(r"\b[Ss]et (?!exactly|, but).*|Nearest valid .*|Did you mean .*", message)
    return found[0] if found else ""


@pytest.mark.parametrize("cut", [[], ["rollout.top_p=0.9"], ["rollout.top_p=0.9", "rollout.top_k=4"]])
@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_the_advice_of_the_gap_alarm_is_accepted(cut: list[str], correction: str) -> None:
    if cut and correction != "none":
        assert messages([*cut, f"algo.correction={correction}"])[0]  # cannot be run
        return
    own = [*cut, f"algo.correction={correction}"]
    config, _ = compose(own)
    metrics = {"rollout/logprob_gap": 1.0, "rollout/staleness_mean": 0.0}
    [text] = [said for alarm in alarms(config) for _ in range(3) if (said := alarm(metrics, ()))]
    advice = re.findall(r"((?:[a-z_]+\.)+[a-z_]+)=(\S+)", text)
    assert bool(advice) == (correction == "none")
    assert messages(followed(own, [f"{key}={value}" for key, value in advice])) == ([], [])


def test_every_message_that_says_what_to_set_is_tried() -> None:
    """A new message needs a case above: every setting that follows "Set" in the source must occur in a case."""
    source = inspect.getsource(relations) + inspect.getsource(algo_relations)
    named = set(re.findall(r"[Ss]et ((?:[a-z_]+\.)+[a-z_]+)", source)) | set(
        re.findall(r"steps\.append\(\"([a-z_.]+)=", source)
    )
    tried = {one.partition("=")[0] for _, ways in CASES for way in ways for one in way}
    assert {name.rstrip(".") for name in named} - tried == {"reward.functions"}
