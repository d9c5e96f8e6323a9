"""The loop: its calls to the roles and their order. The roles here only record their calls."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_roles import Run, make

from tandem.platform.algorithms.registry import ESTIMATORS, POLICY_LOSSES, resolve
from tandem.platform.experience.batch import Prompt, StopReason
from tandem.platform.loop import driver as driver_module
from tandem.platform.loop.driver import Driver
from tandem.platform.loop.protocols import Sampling, Totals
from tandem.platform.loop.spans import PHASES


def test_order_of_a_step_with_a_critic() -> None:
    run = make(steps=1)
    run.driver.run()
    assert run.log.events == [
        *["load first", "load second", "publish 0"],
        *[
            "submit train 1",
            "collect",
            "score 2",
            "score 2",
            "actor.logprobs",
            "critic.values",
            "critic.update",
            "actor.update",
        ],
        *["load first", "load second", "publish 1"],
    ]


def test_order_of_a_step_without_a_critic() -> None:
    run = make("grpo", steps=1)
    run.driver.run()
    assert run.log.events[3:-3] == ["submit train 1", "collect", "score 2", "score 2", "actor.logprobs", "actor.update"]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_reference_is_asked_only_for_a_kl_term(estimator: str, kl: float) -> None:
    run = make(estimator, steps=1, kl=kl)
    run.driver.run()
    assert ("reference.logprobs" in run.log.events) == (kl > 0)
    assert (run.actor.minibatches[0][0].ref_logprobs is not None) == (kl > 0)
    assert run.steps[0][1].metrics.get("kl/coef") == (kl or None)


def test_phases_are_entered_in_their_order_and_timed_under_their_names() -> None:
    run = make(steps=1, kl=0.1)
    run.driver.run()
    assert list(dict.fromkeys(name for name in run.phases if name in PHASES)) == list(PHASES)
    metrics = run.steps[0][1].metrics
    split = ("infer_old", "infer_reference", "infer_values", "update_critic", "update_actor")
    for name in (*PHASES, *split, "step"):
        assert metrics[f"time/{name}_s"] >= 0
    assert metrics["time/step_s"] >= sum(metrics[f"time/{name}_s"] for name in PHASES)


def test_without_a_critic_nothing_is_timed_for_one() -> None:
    run = make("grpo", steps=1)
    run.driver.run()
    assert not [key for key in run.steps[0][1].metrics if "critic" in key or "values" in key]


def test_critic_and_actor_see_the_same_mini_batches() -> None:
    run = make(steps=2, epochs=2, minibatches=2)
    run.driver.run()
    assert run.critic is not None
    ours = [part for epoch in run.actor.minibatches for part in epoch]
    theirs = [part for step in run.critic.minibatches for part in step]
    assert len(ours) == 8
    assert all(a is b for a, b in zip(ours, theirs, strict=True))


def orders(run: Run) -> list[list[list[int]]]:
    return [[part.rollout.group_ids.tolist() for part in parts] for parts in run.actor.minibatches]


@pytest.mark.parametrize("seed", [0, 10**24])
def test_order_of_updates_follows_from_seed_and_step(seed: int) -> None:
    runs = [make(steps=4, epochs=4, seed=seed) for _ in range(2)]
    for run in runs:
        run.driver.run()
    assert orders(runs[0]) == orders(runs[1])
    shifted = [[[group - 2 * step for group in part] for part in parts] for step, parts in enumerate(orders(runs[0]))]
    assert len({str(parts) for parts in shifted}) > 1


def test_critic_warm_up_leaves_the_actor_alone_and_publishes_nothing() -> None:
    run = make(steps=3, warmup=2)
    run.driver.run()
    assert run.log.names("actor.update", "critic.update", "publish") == [
        *["publish 0", "critic.update", "critic.update", "critic.update", "actor.update", "publish 1"],
    ]
    assert [result.metrics["policy/version"] for _, result in run.steps] == [0, 0, 1]
    assert "actor/loss" not in run.steps[0][1].metrics
    assert run.steps[2][1].metrics["actor/loss"] == 1.5


def test_warm_up_ends_once_the_critic_explains_enough() -> None:
    run = make(steps=3, warmup=3)
    run.driver.config.critic.warmup_until = 0.5
    explained = iter([0.1, 0.5, -1.0])
    sums = {"critic/explained_variance": 0.0}
    original = run.driver._critic_suffices
    run.driver._critic_suffices = lambda described: original({**sums, "critic/explained_variance": next(explained)})  # type: ignore[method-assign]
    run.driver.run()
    updates = run.log.names("actor.update", "critic.update")
    assert updates == ["critic.update", *["critic.update", "actor.update"] * 2]  # once ready, it stays ready


@pytest.mark.parametrize(("limit", "epochs"), [(None, 3), (0.4, 2), (0.1, 1)])
def test_epochs_stop_once_the_policy_has_moved_far_enough(limit: float | None, epochs: int) -> None:
    run = make("grpo", steps=1, epochs=3)
    run.driver.config.algo.kl_stop = limit
    moved = iter([0.2, 0.5, 0.7])
    run.actor.update = lambda parts: Totals({"policy/approx_kl": (next(moved) * 10, 10.0)}, {})  # type: ignore[method-assign]
    run.driver.run()
    assert run.steps[0][1].metrics["policy/epochs"] == epochs


def test_the_kl_coefficient_is_steered_and_reported() -> None:
    run = make("grpo", steps=3)
    assert run.driver.kl_controller.coef == 0.0
    run = make("grpo", steps=3, kl_reward=0.1, kl_target=1.0)
    run.driver.run()
    # policy and reference agree, so KL is 0 and the error -0.2; 4 samples of a horizon of 8 make the factor 0.9
    assert [result.metrics["kl/coef"] for _, result in run.steps] == pytest.approx([0.1, 0.09, 0.081])
    assert [result.metrics["kl/sampled"] for _, result in run.steps] == [0.0] * 3


def test_the_kl_coefficient_stands_still_while_only_the_critic_learns() -> None:
    run = make("gae", steps=4, warmup=2, kl_reward=0.1, kl_target=1.0)
    run.driver.run()
    assert [result.metrics["kl/coef"] for _, result in run.steps] == pytest.approx([0.1, 0.1, 0.1, 0.09])


def test_without_a_token_to_train_on_nothing_is_updated() -> None:
    run = make("grpo", steps=1)
    run.driver.config.algo.overlong_filter = True
    submit = run.rollouts.submit

    def truncated(prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        rollouts, samples = submit(prompts, sampling)
        return [replace(rollout, stop=StopReason.LENGTH) for rollout in rollouts], samples

    run.rollouts.submit = truncated  # type: ignore[method-assign]
    run.driver.run()
    assert run.actor.minibatches == [[]]
    assert run.steps[0][1].metrics["samples/filtered"] == 4


def test_a_correction_does_not_hide_the_gap_that_it_masks() -> None:
    run = make("grpo", steps=1)
    run.driver.config.algo.correction = "mask"
    run.actor.logprobs = lambda batch: batch.rollout_logprobs - 2.0  # type: ignore[method-assign]
    run.driver.run()
    metrics = run.steps[0][1].metrics
    assert (metrics["correction/masked_frac"], metrics["rollout/logprob_gap"]) == (1, 2)


def test_warm_up_of_a_critic_that_does_not_exist_is_nothing() -> None:
    run = make("grpo", steps=1, warmup=2)
    run.driver.run()
    assert "actor.update" in run.log.events


def test_synchronous_samples_are_of_the_current_policy() -> None:
    run = make(steps=3)
    run.driver.run()
    assert run.log.names("submit", "collect", "publish") == [
        *["publish 0", "submit train 1", "collect", "publish 1"],
        *["submit train 2", "collect", "publish 2", "submit train 3", "collect", "publish 3"],
    ]
    assert [result.metrics["rollout/staleness_mean"] for _, result in run.steps] == [0, 0, 0]


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_staleness_submits_ahead_and_never_lags_more(staleness: int) -> None:
    run = make(steps=4, staleness=staleness)
    run.driver.run()
    versions = [[rollout.policy_version for rollout in result.collected.rollouts] for _, result in run.steps]
    assert versions == [[max(0, step - staleness)] * 4 for step in range(4)]
    lags = [result.metrics["rollout/staleness_mean"] for _, result in run.steps]
    assert lags == [min(step, staleness) for step in range(4)]
    first = run.log.events.index("collect")
    assert len([event for event in run.log.events[:first] if event.startswith("submit")]) == min(1 + staleness, 4)
    # Every step is submitted once, and none after the last step.
    assert run.log.names("submit") == [f"submit train {step}" for step in (1, 2, 3, 4)]


def test_prompts_and_seeds_of_each_step_do_not_depend_on_staleness() -> None:
    runs = [make(steps=3, staleness=staleness) for staleness in (0, 2)]
    for run in runs:
        run.driver.run()
    assert runs[0].rollouts.sampled == runs[1].rollouts.sampled
    seeds = [sampling.seed for _, sampling in runs[0].rollouts.sampled]
    assert len(set(seeds)) == 3
    assert [groups for groups, _ in runs[0].rollouts.sampled] == [[0, 1], [2, 3], [4, 5]]


def test_evaluation_before_training_every_n_and_at_the_end() -> None:
    run = make(steps=5, every=2, evaluate=True)
    run.driver.run()
    assert run.log.names("submit") == [
        *["submit eval 0", "submit train 1", "submit train 2", "submit eval 2"],
        *["submit train 3", "submit train 4", "submit eval 4", "submit train 5", "submit eval 5"],
    ]
    assert [step for step, result in run.steps if "eval/held/greedy" in result.metrics] == [2, 4, 5]
    assert "eval/held/greedy" in run.evals[0]
    assert all("time/evaluate_s" in result.metrics for step, result in run.steps if step in (2, 4, 5))
    assert all(result.metrics["step"] == step for step, result in run.steps)


def test_evaluation_on_the_last_step_comes_once() -> None:
    run = make(steps=4, every=2, evaluate=True)
    run.driver.run()
    assert run.log.names("submit").count("submit eval 4") == 1


def test_evaluation_sees_the_policy_of_its_step() -> None:
    run = make(steps=2, every=1, evaluate=True)
    run.driver.run()
    assert run.log.names("submit", "publish") == [
        *["publish 0", "submit eval 0", "submit train 1", "publish 1", "submit eval 1"],
        *["submit train 2", "publish 2", "submit eval 2"],
    ]


def test_no_evaluation_before_training_if_so_set() -> None:
    run = make(steps=1, before=0, evaluate=True)
    run.driver.run()
    assert run.evals == []
    assert run.log.names("submit") == ["submit train 1", "submit eval 1"]


def test_evaluating_does_not_change_what_is_trained_on() -> None:
    runs = [make(steps=3, every=every, evaluate=bool(every), before=every) for every in (0, 1)]
    for run in runs:
        run.driver.run()
    trained = [[item for item in run.rollouts.sampled if item[1].temperature > 0] for run in runs]
    assert trained[0] == trained[1]
    assert orders(runs[0]) == orders(runs[1])


def test_no_steps_only_evaluate() -> None:
    run = make(steps=0, evaluate=True)
    run.driver.run()
    assert run.steps == []
    assert "eval/held/greedy" in run.evals[0]
    assert "collect" in run.log.events


def test_metrics_of_a_step() -> None:
    run = make(steps=1)
    run.driver.run()
    metrics = run.steps[0][1].metrics
    expected = {
        "step": 1,
        "policy/version": 1,
        "reward/mean": 0.5,
        "actor/loss": 1.5,
        "critic/loss": 1.5,
        "rollout/logprob_gap": 0,
        "memory/actor/weights_bytes": 10,
        "memory/critic/peak_bytes": 20,
        "memory/rollout/peak_bytes": 5,
        "samples/sampled": 4,
        "tokens/trained": 8,
    }
    assert {key: metrics[key] for key in expected} == expected
    assert metrics["tokens/response_per_s"] == pytest.approx(metrics["tokens/response"] / metrics["time/step_s"])


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_roles_must_match_what_the_algorithm_asks_for(estimator: str) -> None:
    wrong = resolve("any", {"gae": "grpo", "grpo": "gae"}[estimator], "clipped_surrogate")
    run = make(estimator)
    with pytest.raises(AssertionError, match="the critic follows from the algorithm alone"):
        Driver(run.config, wrong, run.driver.roles, run.driver.source, 1)


def test_the_step_stays_short() -> None:
    assert len(inspect.getsource(Driver.step).splitlines()) < 25


def test_the_driver_names_no_algorithm() -> None:
    source = inspect.getsource(driver_module).lower()
    for name in ("ppo", *ESTIMATORS, *POLICY_LOSSES, "config.adv_estimator", "algorithm.name"):
        assert name not in source, name


@pytest.mark.parametrize(("policy", "critic", "taken"), [(1, 3, 3), (3, 1, 1), (2, None, 2)])
def test_the_critic_may_take_more_epochs_or_fewer(policy: int, critic: int | None, taken: int) -> None:
    """The epochs that both take have the same mini-batches."""
    run = make(steps=1, epochs=policy, minibatches=2, critic_epochs=critic)
    run.driver.run()
    assert run.critic is not None
    [of_critic], of_policy = run.critic.minibatches, run.actor.minibatches
    assert (len(of_critic), len(of_policy)) == (2 * taken, policy)
    shared = [part for epoch in of_policy for part in epoch][: len(of_critic)]
    assert all(
        torch.equal(one.rollout.group_ids, other.rollout.group_ids) for one, other in zip(shared, of_critic, strict=False)
    )
