"""The names of our settings in other frameworks, for suggestions in messages and for the table of docs/migration.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Named:
    """A setting of ours and its names in TRL (`GRPOConfig`, `PPOConfig`), verl and OpenRLHF."""

    ours: str
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    note: str = ""


ACTOR, ROLLOUT, OPTIM = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.optim."
NAMES = (
    Named("adv_estimator", (), ("algorithm.adv_estimator",), ("advantage_estimator",), "group_norm is grpo"),
    Named("model.path", ("model_name_or_path",), ("actor_rollout_ref.model.path",), ("pretrain",)),
    Named("model.dtype", ("bf16",), (f"{ROLLOUT}dtype",), ("bf16",)),
    Named(
        "model.gradient_checkpointing",
        ("gradient_checkpointing",),
        ("actor_rollout_ref.model.enable_gradient_checkpointing",),
        ("gradient_checkpointing",),
    ),
    Named("data.train", ("dataset_name",), ("data.train_files",), ("prompt_data",)),
    Named("data.eval", (), ("data.val_files",), ("eval_dataset",)),
    Named("data.prompt_key", (), ("data.prompt_key",), ("input_key",)),
    Named("data.answer_key", (), (), ("label_key",)),
    Named("data.max_prompt_tokens", ("max_prompt_length",), ("data.max_prompt_length",), ("prompt_max_len",)),
    Named("data.overlong_prompt", (), ("data.filter_overlong_prompts", "data.truncation"), ()),
    Named(
        "data.prompts_per_step",
        (),
        ("data.train_batch_size",),
        ("rollout_batch_size",),
        "prompts, before samples are drawn",
    ),
    Named("rollout.samples_per_prompt", ("num_generations",), (f"{ROLLOUT}n",), ("n_samples_per_prompt",)),
    Named(
        "rollout.max_response_tokens",
        ("max_completion_length", "response_length"),
        ("data.max_response_length",),
        ("generate_max_len",),
    ),
    Named("rollout.temperature", ("temperature",), (f"{ROLLOUT}temperature",), ("temperature",)),
    Named("rollout.top_p", ("top_p",), (f"{ROLLOUT}top_p",), ("top_p",)),
    Named("rollout.top_k", ("top_k",), (f"{ROLLOUT}top_k",), ()),
    Named("rollout.engine", ("use_vllm",), (f"{ROLLOUT}name",), ()),
    Named("rollout.replicas", (), (), ("vllm_num_engines",)),
    Named(
        "rollout.tensor_parallel",
        ("vllm_tensor_parallel_size",),
        (f"{ROLLOUT}tensor_model_parallel_size",),
        ("vllm_tensor_parallel_size",),
    ),
    Named(
        "rollout.gpu_memory_share",
        ("vllm_gpu_memory_utilization",),
        (f"{ROLLOUT}gpu_memory_utilization",),
        ("vllm_gpu_memory_utilization",),
    ),
    Named("reward.function", ("reward_funcs",), ("custom_reward_function.path",), ("remote_rm_url",), "path.py:name"),
    Named("reward.model", ("reward_model_path",), ("reward_model.model.path",), ("reward_pretrain",)),
    Named("reward.functions", ("reward_weights",), (), (), "names with their weights"),
    Named("reward.overlong_penalty", (), (), ("overlong_penalty_factor",)),
    Named("reward.overlong_buffer_tokens", (), (), ("overlong_buffer_len",)),
    Named("actor.lr", ("learning_rate",), (f"{OPTIM}lr",), ("actor_learning_rate",)),
    Named(
        "actor.lr_schedule",
        ("lr_scheduler_type",),
        (f"{OPTIM}lr_scheduler_type", f"{OPTIM}warmup_style"),
        ("lr_scheduler",),
        "constant, linear, cosine or wsd",
    ),
    Named(
        "actor.lr_warmup_steps",
        ("warmup_steps", "warmup_ratio"),
        (f"{OPTIM}lr_warmup_steps", f"{OPTIM}lr_warmup_steps_ratio"),
        ("lr_warmup_ratio",),
        "optimizer steps, no ratio",
    ),
    Named("actor.lr_min_ratio", (), (f"{OPTIM}min_lr_ratio",), ()),
    Named("actor.weight_decay", ("weight_decay",), (f"{OPTIM}weight_decay",), ("l2",)),
    Named("actor.beta1", ("adam_beta1",), (), ("adam_betas",)),
    Named("actor.beta2", ("adam_beta2",), (), ()),
    Named("actor.eps", ("adam_epsilon",), (), ()),
    Named("actor.grad_clip", ("max_grad_norm",), (f"{ACTOR}grad_clip",), ("max_norm",)),
    Named("actor.ranks", (), ("trainer.n_gpus_per_node",), ("actor_num_gpus_per_node", "actor_num_nodes"), "ranks in all"),
    Named("critic.lr", (), ("critic.optim.lr",), ("critic_learning_rate",)),
    Named("critic.path", ("value_model_path",), ("critic.model.path",), ("critic_pretrain",)),
    Named("critic.warmup_steps", (), ("trainer.critic_warmup",), ("freezing_actor_steps",)),
    Named("critic.value_clip", ("cliprange_value",), ("critic.cliprange_value",), ("value_clip",)),
    Named("critic.ranks", (), (), ("critic_num_gpus_per_node", "critic_num_nodes")),
    Named("train.epochs_per_batch", ("num_iterations", "num_ppo_epochs"), (f"{ACTOR}ppo_epochs",), ("max_epochs",)),
    Named(
        "train.minibatches",
        ("steps_per_generation", "num_mini_batches"),
        (f"{ACTOR}ppo_mini_batch_size",),
        ("train_batch_size",),
        "how many, not how large",
    ),
    Named(
        "train.max_tokens_per_microbatch",
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        (f"{ACTOR}ppo_max_token_len_per_gpu", f"{ACTOR}ppo_micro_batch_size_per_gpu"),
        ("micro_train_batch_size",),
        "tokens, no sequences; changes no result",
    ),
    Named("algo.gamma", ("gamma",), ("algorithm.gamma",), ("gamma",)),
    Named("algo.lam", ("lam",), ("algorithm.lam",), ("lambd",)),
    Named("algo.clip_ratio_low", ("epsilon", "cliprange"), (f"{ACTOR}clip_ratio", f"{ACTOR}clip_ratio_low"), ("eps_clip",)),
    Named("algo.clip_ratio_high", ("epsilon_high",), (f"{ACTOR}clip_ratio_high",), ("eps_clip_low_high",)),
    Named("algo.dual_clip", (), (f"{ACTOR}clip_ratio_c",), ("dual_clip",)),
    Named("algo.kl_loss_coef", ("beta",), (f"{ACTOR}kl_loss_coef",), (), "0 is off; with --use_kl_loss init_kl_coef"),
    Named("algo.kl_loss_estimator", (), (f"{ACTOR}kl_loss_type",), ("kl_estimator",)),
    Named("algo.kl_reward_coef", ("kl_coef",), ("algorithm.kl_ctrl.kl_coef",), ("init_kl_coef",)),
    Named("algo.kl_target", (), ("algorithm.kl_ctrl.target_kl",), ("kl_target",)),
    Named("algo.kl_horizon", (), ("algorithm.kl_ctrl.horizon",), ("kl_horizon",)),
    Named("algo.entropy_coef", (), (f"{ACTOR}entropy_coeff",), ("entropy_loss_coef",)),
    Named("algo.loss_aggregation", ("loss_type",), (f"{ACTOR}loss_agg_mode",), ()),
    Named("algo.group_std", ("scale_rewards",), ("algorithm.norm_adv_by_std_in_grpo",), ()),
    Named("algo.overlong_filter", ("mask_truncated_completions",), (), ()),
    Named("algo.dynamic_sampling", (), ("algorithm.filter_groups.enable",), ("dynamic_filtering",)),
    Named("trainer.zero_stage", (), (), ("zero_stage",)),
    Named("placement", ("vllm_mode",), (), ("colocate_all_models",), "colocated or split"),
    Named("run.steps", ("max_steps",), ("trainer.total_training_steps",), ()),
    Named("run.epochs", ("num_train_epochs",), ("trainer.total_epochs",), ("num_episodes",)),
    Named("run.name", ("run_name",), ("trainer.experiment_name",), ("wandb_run_name",)),
    Named("run.dir", ("output_dir",), ("trainer.default_local_dir",), ("save_path", "ckpt_path")),
    Named("eval.every", ("eval_steps",), ("trainer.test_freq",), ("eval_steps",)),
    Named("eval.before_training", ("eval_on_start",), ("trainer.val_before_train",), ()),
    Named("eval.samples_per_prompt", (), (f"{ROLLOUT}val_kwargs.n",), ("eval_n_samples_per_prompt",)),
    Named("checkpoint.every", ("save_steps",), ("trainer.save_freq",), ("save_steps",)),
    Named("checkpoint.keep", ("save_total_limit",), ("trainer.max_actor_ckpt_to_keep",), ("max_ckpt_num",)),
    Named("checkpoint.resume", ("resume_from_checkpoint",), ("trainer.resume_mode",), ("load_checkpoint",)),
    Named("tracking.sinks", ("report_to",), ("trainer.logger",), ("use_wandb", "use_tensorboard")),
    Named("tracking.project", (), ("trainer.project_name",), ("wandb_project",)),
)


def ours(name: str) -> Named | None:
    """Our setting for a name in another framework, given with or without its dotted path."""
    wanted = name.lstrip("-").replace("-", "_")
    full = {other: named for named in reversed(NAMES) for other in (*named.trl, *named.verl, *named.openrlhf)}
    by_leaf = {other.rpartition(".")[2]: named for other, named in full.items()}  # the first in the table wins
    return full.get(wanted) or by_leaf.get(wanted.rpartition(".")[2])


def migration_table() -> str:
    """The names as a Markdown table with a line per setting."""
    lines = ["| tandem | TRL | verl | OpenRLHF | |", "|---|---|---|---|---|"]
    for named in NAMES:
        cells = [", ".join(f"`{name}`" for name in names) for names in (named.trl, named.verl, named.openrlhf)]
        lines.append(f"| `{named.ours}` | {' | '.join(cells)} | {named.note} |")
    return "\n".join(lines) + "\n"
