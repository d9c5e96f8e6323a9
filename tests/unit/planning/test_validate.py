"""Cross-checks of the configuration: errors with their messages, and warnings."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.platform.config.schema import Config, ConfigError, each_setting
from tandem.platform.planning.choices import choices_of
from tandem.platform.planning.validate import validate
from tandem.platform.system.text import did_you_mean


def config(**values: Any) -> Config:
    """The defaults with 3 steps and the given settings; `data__prompts_per_step` stands for a dotted key."""
    result = Config()
    result.run.steps, result.reward.functions = 3, {"exact_match": 1.0}
    for key, value in values.items():
        *sections, name = key.split("__")
        target: Any = result
        for section in sections:
            target = getattr(target, section)
        assert hasattr(target, name), key
        setattr(target, name, value)
    return result


def refused(*given: str, **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config(**values), given)
    return str(caught.value)


def test_the_defaults_pass_without_a_warning() -> None:
    assert validate(config()) == []
    assert validate(config(adv_estimator="grpo")) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"data__prompts_per_step": 0}, "data.prompts_per_step=0: must be at least 1"),
        ({"algo__gamma": 1.5}, "algo.gamma=1.5: must be at most 1"),
        ({"algo__dual_clip": 1.0}, "algo.dual_clip=1: must be above 1"),
        ({"rollout__temperature": 0.0}, "rollout.temperature=0: must be above 0"),
        ({"rollout__temperature": -1.0}, "rollout.temperature=-1: must be above 0"),
        ({"actor__lr": math.nan}, "actor.lr=nan: must be at least 0"),
        ({"algo__clip_ratio_low": 0.0}, "algo.clip_ratio_low=0: must be above 0"),
        ({"critic__value_clip": 0.0}, "critic.value_clip=0: must be above 0"),
        (
            {"algo__correction_level": "tokens"},
            "algo.correction_level=tokens: not one of token, sequence. Did you mean token?",
        ),
        ({"algo__group_std": "smaple"}, "algo.group_std=smaple: not one of sample, population, none. Did you mean sample?"),
        ({"trainer__zero_stage": 4}, "trainer.zero_stage=4: must be at most 3"),
    ],
)
def test_a_value_out_of_bounds(values: dict[str, Any], text: str) -> None:
    assert refused(**values) == text


def test_equal_clip_ratios_and_no_dual_clip_are_fine() -> None:
    assert validate(config(algo__clip_ratio_low=0.2, algo__clip_ratio_high=0.2, algo__dual_clip=None)) == []


def test_every_bound_and_choice_admits_its_default() -> None:
    for key, value, meta in each_setting(Config()):
        assert meta["help"], key
        assert not choices_of(key, meta) or value is None or value in choices_of(key, meta), key


def test_all_problems_are_told_at_once() -> None:
    assert len(refused(algo__gamma=2.0, algo__lam=2.0).splitlines()) == 2
    assert len(refused(run__steps=None, rollout__samples_per_prompt=1, adv_estimator="grpo").splitlines()) == 2


def test_group_estimator_with_a_group_of_one() -> None:
    text = refused(adv_estimator="grpo", rollout__samples_per_prompt=1)
    assert "adv_estimator=grpo" in text
    assert "at least 2 samples, but rollout.samples_per_prompt=1" in text
    assert "Set rollout.samples_per_prompt=2 or more, or adv_estimator=gae" in text
    assert validate(config(adv_estimator="gae", rollout__samples_per_prompt=1)) == []


@pytest.mark.parametrize(
    "key", ["critic.lr", "critic.path", "critic.warmup_steps", "algo.gamma", "algo.bootstrap_truncated"]
)
def test_setting_that_a_run_without_a_critic_does_not_read(key: str) -> None:
    text = refused(key, "actor.lr", adv_estimator="grpo")
    assert text == f"{key} is set, but adv_estimator=grpo does not read it. Remove it, or change adv_estimator"
    assert validate(config(), [key]) == []


def test_setting_that_a_run_with_a_critic_does_not_read() -> None:
    assert "algo.group_std is set, but adv_estimator=gae does not read it" in refused("algo.group_std")
    assert validate(config(adv_estimator="grpo"), ["algo.group_std"]) == []


def test_batch_that_does_not_divide_names_the_nearest_sizes() -> None:
    text = refused(data__prompts_per_step=3, rollout__samples_per_prompt=4, train__minibatches=5)
    assert "data.prompts_per_step=3 prompts x rollout.samples_per_prompt=4 = 12 samples" in text
    assert "train.minibatches=5 equal mini-batches" in text
    assert "Nearest valid train.minibatches: 4 or 6" in text


def test_more_mini_batches_than_samples() -> None:
    text = refused(data__prompts_per_step=2, rollout__samples_per_prompt=4, train__minibatches=9)
    assert text.endswith("Nearest valid train.minibatches: 8")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_fewer_samples_than_ranks(role: str) -> None:
    sizes: dict[str, Any] = {"data__prompts_per_step": 2, "rollout__samples_per_prompt": 2, "train__minibatches": 2}
    text = refused(**sizes, **{f"{role}__ranks": 3})
    assert "a mini-batch has 2 samples" in text
    assert "2 prompts x rollout.samples_per_prompt=2 = 4 samples, in train.minibatches=2" in text
    assert f"fewer than {role}.ranks=3. Set {role}.ranks=2 or fewer" in text


def test_ranks_need_not_divide_the_batch() -> None:
    assert validate(config(data__prompts_per_step=3, rollout__samples_per_prompt=4, actor__ranks=5)) == []


def test_critic_ranks_do_not_matter_without_a_critic() -> None:
    assert validate(config(adv_estimator="grpo", data__prompts_per_step=1, critic__ranks=64)) == []


def test_several_gpus_for_one_engine() -> None:
    text = refused(rollout__engine="hf", rollout__tensor_parallel=2)
    assert "rollout.tensor_parallel=2: only rollout.engine=vllm runs on several GPUs" in text
    assert "Set placement=split" in text
    assert validate(config(rollout__engine="vllm", rollout__tensor_parallel=2, placement__name="split")) == []


def test_stop_strings_and_room_for_sequences() -> None:
    assert "an empty text would end every response" in refused(rollout__stop=["7", ""])
    text = refused(rollout__max_model_tokens=95)
    assert "rollout.max_model_tokens=95 tokens is less than one sequence: data.max_prompt_tokens=64" in text
    assert "= 96 tokens" in text


def test_settings_of_an_engine_that_is_not_used_are_named() -> None:
    given = {"rollout.kv_cache_gb", "rollout.prefix_caching"}
    [warning] = validate(config(rollout__engine="hf"), given)
    assert warning == "rollout.kv_cache_gb, rollout.prefix_caching: not read, since rollout.engine=hf"
    [warning] = validate(config(), given)
    assert warning.endswith("read only by vLLM, which rollout.engine=auto uses only on a GPU")
    assert validate(config(rollout__engine="vllm"), given) == []


def test_settings_of_ray_without_ray_are_named() -> None:
    given = {"placement.strategy", "cluster.max_restarts"}
    assert validate(config(cluster__name="inline"), given) == [
        "cluster.max_restarts, placement.strategy: not read, since cluster=inline has no Ray"
    ]
    assert validate(config(), given) == []
    joined = config(cluster__address="10.0.0.1:6379")
    assert validate(joined, {"cluster.num_cpus"}) == [
        "cluster.num_cpus: not read, since the run joins the cluster at cluster.address=10.0.0.1:6379"
    ]


def test_more_engines_than_prompts() -> None:
    text = refused(data__prompts_per_step=2, rollout__replicas=3)
    assert "rollout.replicas=3 engines share data.prompts_per_step=2 prompts; set rollout.replicas=2 or fewer" in text


def test_micro_batch_smaller_than_a_sequence() -> None:
    text = refused(train__max_tokens_per_microbatch=95)
    assert "train.max_tokens_per_microbatch=95 tokens is less than one sequence" in text
    assert "data.max_prompt_tokens=64 + rollout.max_response_tokens=32 = 96 tokens" in text
    assert "Set train.max_tokens_per_microbatch=96 or more" in text
    assert validate(config(train__max_tokens_per_microbatch=96)) == []


@pytest.mark.parametrize(("steps", "epochs"), [(None, None), (3, 1.0)])
def test_length_of_the_run(steps: int | None, epochs: float | None) -> None:
    text = refused(run__steps=steps, run__epochs=epochs)
    assert text == f"run.steps={steps} steps and run.epochs={epochs} epochs: set exactly one of them"
    assert validate(config(run__steps=None, run__epochs=0.5)) == []


def test_k1_as_a_loss_is_refused() -> None:
    text = refused(algo__kl_loss_coef=0.1, algo__kl_loss_estimator="k1")
    assert "algo.kl_loss_estimator=k1" in text
    assert "Set k2" in text
    assert validate(config(algo__kl_loss_coef=0.0, algo__kl_loss_estimator="k1")) == []
    assert validate(config(algo__kl_reward_coef=0.1, algo__kl_reward_estimator="k1")) == []


def test_both_kl_terms_are_warned_of() -> None:
    [warning] = validate(config(algo__kl_loss_coef=0.1, algo__kl_reward_coef=0.1))
    assert "counts twice" in warning


def test_kl_estimator_without_a_kl_term_is_warned_of() -> None:
    [warning] = validate(config(), ["algo.kl_loss_estimator"])
    assert warning == "algo.kl_loss_estimator is set, but algo.kl_loss_coef is off"
    assert validate(config(algo__kl_loss_coef=0.1), ["algo.kl_loss_estimator"]) == []


def test_reference_is_needed_for_either_kl_term_and_only_then() -> None:
    flags = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (0.1, 0.1)]
    needed = [config(algo__kl_reward_coef=a, algo__kl_loss_coef=b).needs_reference for a, b in flags]
    assert needed == [False, True, True, True]


def test_model_and_path_must_agree() -> None:
    assert "model=tiny is the embedded model, but model.path=/m is set" in refused(model__path="/m")
    assert "model=pretrained needs model.path" in refused(model__name="pretrained")
    assert validate(config(model__name="pretrained", model__path="/m")) == []


def test_rewards() -> None:
    text = refused(reward__functions={"exact_mach": 1.0})
    assert "reward.functions.exact_mach: no such reward function" in text
    assert "Did you mean exact_match?" in text
    assert refused(reward__functions={"exact_match": 0.0}).startswith("no reward: set reward.functions")
    assert validate(config(reward__functions={}, reward__model="/m")) == []


@pytest.mark.parametrize("key", ["actor__ranks", "critic__ranks", "rollout__replicas"])
def test_inline_has_one_rank_per_role(key: str) -> None:
    dotted = key.replace("__", ".")
    text = refused(cluster__name="inline", **{key: 2})
    assert text == f"cluster=inline has one rank per role, but {dotted}=2. Set {dotted}=1 or cluster=local"


def test_inline_joins_no_cluster() -> None:
    text = refused(cluster__name="inline", cluster__address="10.0.0.1:6379")
    assert "cannot join cluster.address=10.0.0.1:6379" in text


def test_settings_that_are_not_read_are_warned_of() -> None:
    [warning] = validate(config(model__name="pretrained", model__path="/m"), ["model.tiny.layers", "actor.lr"])
    assert warning == "model.tiny.layers: not read, since model.path=/m is set"
    [warning] = validate(config(data__train="a.jsonl"), ["task.digits"])
    assert warning == "task.digits: not read, since data.train=a.jsonl is set"


def test_a_reward_function_may_not_hide_a_metric() -> None:
    assert "the metric reward/mean is reserved" in refused(reward__function="own.py:mean")
    assert "the metric reward/unscorable_error is reserved" in refused(reward__function="own.py:unscorable_error")
    assert validate(config(reward__function="own.py:meaning")) == []


def test_a_policy_that_never_learns_is_warned_of() -> None:
    [warning] = validate(config(critic__warmup_steps=3))
    assert warning.startswith("critic.warmup_steps=3 steps of run.steps=3: the policy never learns")
    assert validate(config(critic__warmup_steps=2)) == []
    assert validate(config(run__steps=None, run__epochs=1.0, critic__warmup_steps=99)) == []


def test_did_you_mean() -> None:
    assert did_you_mean("exact_mach", ["boxed", "exact_match"]) == ". Did you mean exact_match?"
    assert did_you_mean("zzz", ["boxed"]) == ""


def test_trackers_and_the_best_checkpoints() -> None:
    bad = config(
        tracking__sinks=["wandbb", "mlflow", "mlflow"], checkpoint__keep_best=1, checkpoint__every=10, eval__every=4
    )
    with pytest.raises(ConfigError) as caught:
        validate(bad)
    text = str(caught.value)
    assert "tracking.sinks: wandbb is not one of tensorboard, wandb, mlflow. Did you mean wandb?" in text
    assert "name each tracker only once" in text
    assert "checkpoint.every=10 and eval.every=4 steps some have no evaluation" in text


@pytest.mark.parametrize("name", ["x::y", "..", "a/b", "", "two words"])
def test_a_run_is_named_like_a_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name=.* must be a valid folder name"):
        validate(config(run__name=name))
    assert validate(config(run__name="ppo_seed-1.a")) == []
