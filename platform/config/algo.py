"""The settings `algo.*`: parameters of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.platform.config.setting import setting


@dataclass
class AlgoConfig:
    """Parameters of the algorithm. `algo=NAME` sets all of them, and adv_estimator."""

    name: str = setting("ppo", "name of the algorithm")
    paper: str = setting("", "paper that describes it")
    policy_loss: str = setting(
        "clipped_surrogate",
        "policy objective; your own: path.py:name",
        or_path=True,
    )
    gamma: float = setting(1.0, "discount per token (gae, reinforce_pp)", at_least=0, at_most=1)
    lam: float = setting(1.0, "lambda of GAE, for the critic's returns and the advantages (gae)", at_least=0, at_most=1)
    lam_policy: float | None = setting(
        None, "separate lambda for the advantages; null: algo.lam (gae)", at_least=0, at_most=1
    )
    lam_length_alpha: float | None = setting(
        None, "alpha of a lambda by length for the advantages, 1 - 1 / (alpha * response tokens); null: off (gae)", above=0
    )
    bootstrap_truncated: bool = setting(False, "bootstrap truncated responses with the value after the last token (gae)")
    group_std: str = setting(
        "sample",
        "standard deviation that a group's advantages are divided by (grpo, grpo_process)",
        choices=("sample", "population", "none"),
    )
    whiten_advantages: bool = setting(False, "whiten advantages to mean 0 and standard deviation 1 over the batch's tokens")
    clip_ratio_low: float = setting(0.2, "the ratio is clipped at 1 - this", above=0, at_most=1)
    clip_ratio_high: float = setting(0.2, "the ratio is clipped at 1 + this", above=0)
    dual_clip: float | None = setting(
        None, "dual clip c: if an advantage A is negative, its loss is at most -c A; null: off", above=1
    )
    kl_reward_coef: float = setting(0.0, "KL penalty inside the reward, per token; 0: off", at_least=0)
    kl_reward_estimator: str = setting("k1", "estimator of the KL in the reward")
    kl_target: float | None = setting(
        None, "adapt algo.kl_reward_coef towards this KL, in nats per token; null: fixed coefficient", above=0
    )
    kl_horizon: int = setting(10_000, "samples over which the coefficient adapts", at_least=1)
    kl_loss_coef: float = setting(0.0, "KL term of the loss; 0: off", at_least=0)
    kl_loss_estimator: str = setting("k3", "estimator of the KL in the loss")
    kl_loss_gradient: str | None = setting(
        None, "estimator that provides the gradient of the KL in the loss; null: algo.kl_loss_estimator"
    )
    kl_stop: float | None = setting(
        None, "stop the epochs over a batch once policy/approx_kl (nats per token) is above this; null: off", above=0
    )
    entropy_coef: float = setting(0.0, "entropy bonus of the loss", at_least=0)
    positive_nll_coef: float = setting(0.0, "coefficient of the NLL of correct answers; 0: off", at_least=0)
    positive_above: float = setting(0.0, "an answer is correct if its reward before shaping is above this")
    loss_aggregation: str = setting(
        "token-mean",
        "how token losses are aggregated to one number",
    )
    correction: str = setting(
        "none",
        "importance weights, trainer over sampler: bound them from above, or mask out tokens or responses out of range",
        choices=("none", "truncate", "mask"),
    )
    correction_level: str = setting("token", "one weight per token, or per response", choices=("token", "sequence"))
    correction_max: float = setting(2.0, "largest weight", above=0)
    correction_min: float = setting(0.5, "smallest weight (correction=mask)", at_least=0)
    overlong_filter: bool = setting(False, "mask truncated responses out of the losses, not out of their group's baseline")
    dynamic_sampling: bool = setting(False, "sample until every group of the batch carries signal")
    dynamic_metric: str = setting(
        "accuracy", "metric in which a group must vary: reward before or after shaping", choices=("accuracy", "reward")
    )
    dynamic_max_rounds: int = setting(10, "rounds of data.prompts_per_step prompts per step", at_least=1)
    dynamic_at_cap: str = setting(
        "mask",
        "after the last round: fill up with groups without signal, masked out of the losses or kept in them, or stop",
        choices=("mask", "keep", "error"),
    )
    dynamic_surplus: str = setting(
        "drop", "groups with signal beyond the batch: drop them, or keep them for the next step", choices=("drop", "keep")
    )
