"""The settings `algo.*`: numbers of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.platform.config.setting import setting


@dataclass
class AlgoConfig:
    """Numbers of the algorithm. `algo=NAME` sets them all, and adv_estimator with them."""

    name: str = setting("ppo", "what the numbers are called")
    paper: str = setting("", "where they come from")
    policy_loss: str = setting(
        "clipped_surrogate",
        "policy objective, your own as path.py:name",
        or_path=True,
    )
    gamma: float = setting(1.0, "discount per token (gae, reinforce_pp)", at_least=0, at_most=1)
    lam: float = setting(1.0, "lambda of GAE: the critic's returns, and the advantages (gae)", at_least=0, at_most=1)
    lam_policy: float | None = setting(
        None, "another lambda for the advantages alone; null: algo.lam (gae)", at_least=0, at_most=1
    )
    lam_length_alpha: float | None = setting(
        None, "or one by length: 1 - 1 / (this * response tokens); null: off (gae)", above=0
    )
    bootstrap_truncated: bool = setting(False, "add the value after the last token to a truncated response (gae)")
    group_std: str = setting(
        "sample",
        "what a group's advantages are divided by (grpo, grpo_process)",
        choices=("sample", "population", "none"),
    )
    whiten_advantages: bool = setting(False, "zero mean and unit standard deviation over the batch's tokens")
    clip_ratio_low: float = setting(0.2, "the ratio is clipped at 1 - this", above=0, at_most=1)
    clip_ratio_high: float = setting(0.2, "the ratio is clipped at 1 + this", above=0)
    dual_clip: float | None = setting(None, "loss of a negative advantage is at most this times it; null: off", above=1)
    kl_reward_coef: float = setting(0.0, "KL penalty inside the reward, per token; 0: off", at_least=0)
    kl_reward_estimator: str = setting("k1", "estimator of the KL in the reward")
    kl_target: float | None = setting(
        None, "steer algo.kl_reward_coef towards this KL, in nats per token; null: the coefficient is fixed", above=0
    )
    kl_horizon: int = setting(10_000, "samples over which the coefficient adapts", at_least=1)
    kl_loss_coef: float = setting(0.0, "KL term of the loss; 0: off", at_least=0)
    kl_loss_estimator: str = setting("k3", "estimator of the KL in the loss")
    kl_loss_gradient: str | None = setting(
        None, "estimator whose gradient it has instead (straight-through); null: its own"
    )
    kl_stop: float | None = setting(
        None, "no further epoch over a batch once policy/approx_kl (nats per token) is above this; null: off", above=0
    )
    entropy_coef: float = setting(0.0, "entropy bonus of the loss", at_least=0)
    positive_nll_coef: float = setting(0.0, "imitation of right answers: coefficient of their NLL; 0: off", at_least=0)
    positive_above: float = setting(0.0, "a right answer has a reward, before shaping, above this")
    loss_aggregation: str = setting(
        "token-mean",
        "how token losses become one number",
    )
    correction: str = setting(
        "none",
        "importance weights of trainer against sampler: bound them from above, or mask out what is out of range",
        choices=("none", "truncate", "mask"),
    )
    correction_level: str = setting("token", "a weight for each token, or each response", choices=("token", "sequence"))
    correction_max: float = setting(2.0, "largest weight", above=0)
    correction_min: float = setting(0.5, "smallest weight (correction=mask)", at_least=0)
    overlong_filter: bool = setting(False, "truncated responses count in no loss; in their group's baseline they do")
    dynamic_sampling: bool = setting(False, "sample until every group of the batch carries signal")
    dynamic_metric: str = setting(
        "accuracy", "in which a group must vary: the reward before or after shaping", choices=("accuracy", "reward")
    )
    dynamic_max_rounds: int = setting(10, "rounds of data.prompts_per_step prompts per step", at_least=1)
    dynamic_at_cap: str = setting(
        "mask",
        "after the last round: fill up with groups without signal, masked out of the losses or counted in them, or stop",
        choices=("mask", "keep", "error"),
    )
    dynamic_surplus: str = setting(
        "drop", "groups with signal beyond the batch: drop them, or keep them for the next step", choices=("drop", "keep")
    )
