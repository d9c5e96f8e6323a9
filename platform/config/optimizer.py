"""The settings `actor.*` and `critic.*`: the trained roles and their optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.platform.config.setting import setting


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = setting(1e-6, "learning rate", at_least=0)
    lr_warmup_steps: int = setting(0, "optimizer steps of linear warm-up", at_least=0)
    lr_schedule: str = setting(
        "constant",
        "learning rate after the warm-up: constant, linear or cosine decay, or wsd: stable, then linear decay",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_total_steps: int | None = setting(
        None, "optimizer steps until the schedule has decayed, warm-up included; null: all steps of the run", at_least=1
    )
    lr_min_ratio: float = setting(0.0, "final learning rate of a schedule, as a share of lr", at_least=0, at_most=1)
    lr_decay_fraction: float = setting(
        0.1, "share of the optimizer steps after the warm-up during which wsd decays", above=0, at_most=1
    )
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0)
    beta1: float = setting(0.9, "decay of the first moment", at_least=0, at_most=1)
    beta2: float = setting(0.999, "decay of the second moment", at_least=0, at_most=1)
    eps: float = setting(1e-8, "term added to the root of the second moment", above=0)
    grad_clip: float = setting(1.0, "largest norm of the gradient", above=0)


@dataclass
class ActorConfig(OptimizerConfig):
    """The policy's optimizer and ranks."""

    ranks: int = setting(1, "data-parallel ranks", at_least=1)


@dataclass
class CriticConfig(OptimizerConfig):
    """The critic's model, optimizer, loss and ranks. No critic exists unless adv_estimator needs one."""

    lr: float = setting(1e-5, "learning rate", at_least=0)
    ranks: int = setting(1, "data-parallel ranks", at_least=1)
    path: str | None = setting(None, "folder or hub name of the initial weights; null: the actor's")
    head: str = setting(
        "zero", "initial value head: zeros, or the score head of the reward model at critic.path", choices=("zero", "score")
    )
    warmup_steps: int = setting(0, "largest number of first training steps in which only the critic learns", at_least=0)
    warmup_until: float | None = setting(
        None, "end the warm-up once critic/explained_variance reaches this; null: use all warmup_steps", at_most=1
    )
    epochs_per_batch: int | None = setting(
        None,
        "the critic's passes over each batch, which may be more than the policy's; null: train.epochs_per_batch",
        at_least=1,
    )
    value_clip: float | None = setting(0.2, "how far a value may move from the old value; null: off", above=0)
