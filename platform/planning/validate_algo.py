"""Checks the settings `algo.*` against each other and against related settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tandem.platform.algorithms.registry import Algorithm, estimator_of, objective_of
from tandem.platform.config.schema import Config
from tandem.platform.loop.alarms import against_another_sampler
from tandem.platform.rewards.shaping import overlong_buffer


def algo_problems(config: Config, algorithm: Algorithm, given: Collection[str]) -> Iterator[str]:
    """Yields combinations of settings that cannot work, with what to set instead."""
    algo = config.algo
    if algo.kl_loss_coef > 0 and (algo.kl_loss_gradient or algo.kl_loss_estimator) == "k1":
        key = "algo.kl_loss_gradient" if algo.kl_loss_gradient else "algo.kl_loss_estimator"
        yield (
            f"{key}=k1: as a loss its expected gradient is zero, so it has no effect. "
            "Set k2 (gradient of KL(policy || reference)) or k3, or keep k1 for the value and set algo.kl_loss_gradient=k2"
        )
    if algo.lam_policy is not None and algo.lam_length_alpha is not None:
        both = f"algo.lam_policy={algo.lam_policy:g} and algo.lam_length_alpha={algo.lam_length_alpha:g}"
        yield f"{both} both set the lambda of the advantages. Set one of them to null"
    if algo.kl_target is not None and algo.kl_reward_coef == 0:
        yield (
            f"algo.kl_target={algo.kl_target:g} nats per token adapts algo.kl_reward_coef, which is 0 and stays 0. "
            "Set algo.kl_reward_coef to an initial value, for example 0.01"
        )
    if algo.correction == "mask" and algo.correction_min >= algo.correction_max:
        bounds = f"algo.correction_min={algo.correction_min:g} and algo.correction_max={algo.correction_max:g}"
        yield f"{bounds}: no weight lies between them. Set algo.correction_min lower"
    yield from _sampling(config)
    yield from _rewards(config, algorithm)


def _sampling(config: Config) -> Iterator[str]:
    algo, rollout = config.algo, config.rollout
    if algo.correction != "none" and (rollout.top_p < 1 or rollout.top_k is not None):
        top_k = "null" if rollout.top_k is None else rollout.top_k
        yield (
            f"algo.correction={algo.correction} compares the log-probs of sampler and trainer, but with rollout.top_p="
            f"{rollout.top_p:g} and rollout.top_k={top_k} samples come from a truncated distribution that the trainer does "
            "not use. Set rollout.top_p=1 and rollout.top_k=null, or algo.correction=none"
        )
    if algo.dynamic_sampling and config.group < 2:
        yield (
            "algo.dynamic_sampling=true keeps prompts whose samples differ, but rollout.samples_per_prompt="
            f"{config.group}. Set rollout.samples_per_prompt=2 or more, or algo.dynamic_sampling=false"
        )


def _rewards(config: Config, algorithm: Algorithm) -> Iterator[str]:
    reward, longest = config.reward, config.rollout.max_response_tokens
    buffer = overlong_buffer(reward, longest)
    if reward.overlong_penalty > 0 and buffer > longest:
        yield (
            f"reward.overlong_buffer_tokens={buffer} tokens is more than rollout.max_response_tokens={longest} tokens. "
            f"Set reward.overlong_buffer_tokens={longest} or less"
        )
    if config.critic.head == "score" and config.critic.path is None and algorithm.needs_critic:
        yield "critic.head=score takes the head of a reward model, but critic.path is null. Set critic.path to its folder"


def algo_warnings(config: Config, given: Collection[str]) -> Iterator[str]:
    """Yields combinations of settings that work but are probably not intended."""
    algo, rollout = config.algo, config.rollout
    if algo.kl_reward_coef > 0 and algo.kl_loss_coef > 0:
        yield "algo.kl_reward_coef and algo.kl_loss_coef are both on: the KL to the reference counts twice"
    if algo.correction == "none" and (rollout.top_p < 1 or rollout.top_k is not None):
        yield (
            "rollout.top_p and rollout.top_k truncate the sampling distribution, not the trained one: tokens outside the "
            "cut are never tried, and the gradient uses samples that do not follow the policy"
        )
    updates = config.train.epochs_per_batch * config.train.minibatches
    for part, one_update in (
        (f"adv_estimator={config.adv_estimator}", estimator_of(config.adv_estimator).one_update),
        (f"algo.policy_loss={algo.policy_loss}", objective_of(algo.policy_loss).one_update),
    ):
        if updates > 1 and one_update:
            yield (
                f"train.epochs_per_batch={config.train.epochs_per_batch} x train.minibatches={config.train.minibatches} = "
                f"{updates} updates per batch, but {part} is meant for one: from the second update on, samples are "
                "off-policy"
            )
    if rollout.max_staleness > 0 and algo.correction == "none":
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: samples lag behind the policy and nothing corrects for it. "
            f"{against_another_sampler(config)}"
        )
    if algo.dynamic_sampling and algo.dynamic_surplus == "keep" and algo.correction == "none":
        yield (
            "algo.dynamic_surplus=keep: groups kept for the next step lag behind the policy and nothing corrects for it. "
            f"{against_another_sampler(config)}"
        )
    yield from _on_the_last_step(config)
    yield from _without_effect(config, given)


def _on_the_last_step(config: Config) -> Iterator[str]:
    """Yields settings that change the reward of a whole response although the estimator compares its steps."""
    whole = {
        f"reward.clip={config.reward.clip}": config.reward.clip is not None,
        "reward.normalize=mean_std": config.reward.normalize == "mean_std",
    }
    for key in (key for key, on in whole.items() if on and estimator_of(config.adv_estimator).rewards_steps):
        yield (
            f"{key} changes the reward of a whole response, and the change lands on its last step, which "
            f"adv_estimator={config.adv_estimator} compares with the other steps. Use reward.normalize=std or reward.scale"
        )


def _without_effect(config: Config, given: Collection[str]) -> Iterator[str]:
    """Yields settings that are read without effect, or not read."""
    algo, longest = config.algo, config.rollout.max_response_tokens
    if algo.kl_stop is not None and config.train.epochs_per_batch == 1:
        yield f"algo.kl_stop={algo.kl_stop:g} has no effect: with train.epochs_per_batch=1 there is no later epoch to skip"
    if config.reward.overlong_penalty > 0 and overlong_buffer(config.reward, longest) == 0:
        yield (
            f"reward.overlong_penalty={config.reward.overlong_penalty:g} has no effect: with a buffer of 0 tokens it "
            f"begins beyond rollout.max_response_tokens={longest} tokens, which no response exceeds. "
            "Set reward.overlong_buffer_tokens=1 or more"
        )
    if estimator_of(config.adv_estimator).whitens and "algo.whiten_advantages" in given and not algo.whiten_advantages:
        yield (
            f"algo.whiten_advantages=false is not read: adv_estimator={config.adv_estimator} whitens by definition. "
            "Remove it, or change adv_estimator"
        )
    for switch, on, names in _switches(config):
        for key in sorted(key for key in given if not on and key.startswith(names)):
            yield f"{key} is set, but {switch} is off"


def _switches(config: Config) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """(switch, whether it is on, the settings that are read only if it is on)."""
    algo = config.algo
    yield "algo.kl_reward_coef", algo.kl_reward_coef > 0, ("algo.kl_reward_estimator",)
    yield "algo.kl_target", algo.kl_target is not None, ("algo.kl_horizon",)
    yield "algo.kl_loss_coef", algo.kl_loss_coef > 0, ("algo.kl_loss_estimator", "algo.kl_loss_gradient")
    yield "algo.correction", algo.correction != "none", ("algo.correction_level", "algo.correction_max")
    yield "algo.correction=mask", algo.correction == "mask", ("algo.correction_min",)
    yield "algo.dynamic_sampling", algo.dynamic_sampling, ("algo.dynamic_metric", "algo.dynamic_max_rounds")
    yield "algo.dynamic_sampling", algo.dynamic_sampling, ("algo.dynamic_at_cap", "algo.dynamic_surplus")
    yield "algo.positive_nll_coef", algo.positive_nll_coef > 0, ("algo.positive_above",)
    yield "reward.function", config.reward.function is not None, ("reward.function_weight",)
    yield "reward.model", config.reward.model is not None, ("reward.model_weight",)
    yield "reward.overlong_penalty", config.reward.overlong_penalty > 0, ("reward.overlong_buffer_tokens",)
    yield "critic.warmup_steps", config.critic.warmup_steps > 0, ("critic.warmup_until",)
