"""Every setting of tandem, with its default, its bounds and its meaning.

The command line is checked against the classes here. A field is declared with `setting(...)`. Its text is its
documentation (`python launch/main.py --settings` prints the table); its choices and bounds are checked before anything is
allocated. `validate.py` checks relations between settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from tandem.platform.config.algo import AlgoConfig as AlgoConfig
from tandem.platform.config.optimizer import ActorConfig as ActorConfig
from tandem.platform.config.optimizer import CriticConfig as CriticConfig
from tandem.platform.config.optimizer import OptimizerConfig as OptimizerConfig
from tandem.platform.config.setting import setting

GROUP = 8
"""The default number of samples of a prompt, where they are compared with each other."""
MOST_MICROBATCH_TOKENS = 16384
"""The largest micro-batch that is chosen automatically: larger ones are hardly faster."""


@dataclass
class RunConfig:
    """Name, length and folder of the run."""

    name: str | None = setting(None, "name of the run; default: <algo>-seed<seed>-<date>-<time>")
    dir: str = setting("outputs", "folder that holds one folder per run")
    share: str = setting(
        "private",
        "who may read the run's folder besides you: nobody, your group, or everybody",
        choices=("private", "group", "all"),
    )
    seed: int = setting(0, "seed of data order and sampling", at_least=0)
    steps: int | None = setting(None, "training steps (one batch of prompts each)", at_least=0)
    epochs: float | None = setting(None, "passes over the training data, instead of run.steps", above=0)


@dataclass
class DataConfig:
    """Prompts: a file with `prompt` and `answer`, or the embedded task when no file is given."""

    train: str | None = setting(None, "training data, .jsonl or .parquet; null: the embedded task")
    eval: str | None = setting(None, "held-out data, .jsonl or .parquet; null: the embedded task's, if data.train is null")
    eval_sets: dict[str, str] = setting({}, "further held-out data by name: data.eval_sets.NAME=FILE")
    prompt_key: str = setting("prompt", "field with the prompt: text, or chat messages")
    answer_key: str = setting("answer", "field with the reference answer")
    samples_per_step: int = setting(256, "samples in a training step, if data.prompts_per_step is null", at_least=1)
    prompts_per_step: int | None = setting(
        None, "prompts in a training step; null: data.samples_per_step / rollout.samples_per_prompt", at_least=1
    )
    max_prompt_tokens: int = setting(64, "longest prompt, in tokens", at_least=1)
    overlong_prompt: str = setting(
        "error",
        "for a prompt over data.max_prompt_tokens: stop, cut off its beginning, or drop the row",
        choices=("error", "cut", "drop"),
    )
    shuffle: bool = setting(True, "shuffle the data in each epoch, with data.seed")
    seed: int | None = setting(None, "seed of the data order; null: run.seed", at_least=0)


@dataclass
class TaskConfig:
    """The embedded task: procedural and verifiable."""

    name: str = setting("addition", "which embedded task")
    digits: int = setting(2, "digits of each number; of mixed_addition: at most", at_least=1, at_most=6)
    steps: int = setting(4, "additions of a chain (chained_addition)", at_least=1, at_most=16)
    eval_size: int = setting(256, "held-out prompts", at_least=1)
    seed: int = setting(0, "seed of the split into training and held-out prompts", at_least=0)


@dataclass
class TinyConfig:
    """The embedded model: a small Qwen2 with a character tokenizer."""

    hidden_size: int = setting(128, "width of the residual stream", at_least=8)
    intermediate_size: int = setting(512, "width of the MLP", at_least=8)
    layers: int = setting(4, "transformer blocks", at_least=1)
    heads: int = setting(4, "attention heads", at_least=1)


@dataclass
class WarmstartConfig:
    """Supervised fine-tuning of the embedded model on the task's worked examples, cached per user."""

    steps: int = setting(300, "optimizer steps", at_least=0)
    batch_size: int = setting(128, "examples per step", at_least=1)
    lr: float = setting(2e-3, "peak learning rate (linear warm-up, cosine decay)", above=0)
    seed: int = setting(0, "seed of initial weights and example order", at_least=0)


@dataclass
class ModelConfig:
    """The model that is trained."""

    name: str = setting("tiny", "tiny: the embedded model; pretrained: that of model.path", choices=("tiny", "pretrained"))
    path: str | None = setting(None, "folder or hub name; setting it selects model=pretrained")
    dtype: str = setting("float32", "data type of weights and activations", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass: less memory, more time")
    trust_remote_code: bool = setting(False, "run code that comes with the model")
    tiny: TinyConfig = field(default_factory=TinyConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)


@dataclass
class RolloutConfig:
    """How responses are sampled."""

    engine: str = setting(
        "auto", "rollout engine; auto: vllm if CUDA and vLLM are available, else hf", choices=("auto", "hf", "vllm")
    )
    samples_per_prompt: int | None = setting(
        None,
        f"responses per prompt, the group size G; auto or null: {GROUP} if adv_estimator compares the samples of a prompt, "
        "else 1",
        at_least=1,
    )
    max_response_tokens: int = setting(
        32, "longest response, in tokens; default for the embedded model: what its task needs", at_least=1
    )
    temperature: float = setting(1.0, "sampling temperature; every log-prob uses it", above=0)
    top_p: float = setting(1.0, "sample from the most likely tokens of this probability; 1: all", above=0, at_most=1)
    top_k: int | None = setting(None, "sample from this many most likely tokens; null: all", at_least=1)
    replicas: int = setting(1, "engines that sample in parallel", at_least=1)
    max_batch_sequences: int = setting(256, "sequences an engine runs at once", at_least=1)
    stop_token_ids: list[int] = setting([], "tokens that end a response, besides the model's own end tokens")
    stop: list[str] = setting([], "strings that end a response; they are kept in it")
    keep_special_tokens: bool = setting(False, "keep special tokens in the text that reward functions read")
    max_staleness: int = setting(0, "policy updates a sample may lag behind; 0: synchronous", at_least=0, at_most=8)
    seed: int | None = setting(None, "seed of sampling; null: run.seed", at_least=0)
    tensor_parallel: int = setting(1, "GPUs that share one vllm engine", at_least=1)
    gpu_memory_share: float = setting(0.5, "share of each GPU for vllm, weights and cache together", above=0, at_most=1)
    kv_cache_gb: float = setting(1.0, "GiB of vllm's key-value cache on a CPU", above=0)
    max_model_tokens: int | None = setting(
        None, "longest sequence that vllm makes room for, in tokens; null: prompt plus response", at_least=1
    )
    prefix_caching: bool = setting(True, "vllm computes a repeated prompt only once per weight version")


@dataclass
class RewardConfig:
    """The reward of a response: a weighted sum of parts."""

    functions: dict[str, float] = setting(
        {}, "built-in reward functions and their weights; if no reward is set: the embedded task's, or exact_match"
    )
    function: str | None = setting(None, "your own reward function: path.py:name")
    function_weight: float = setting(1.0, "weight of reward.function")
    model: str | None = setting(None, "reward model: folder or hub name of a sequence classifier with one score")
    model_weight: float = setting(1.0, "weight of reward.model")
    processes: int = setting(1, "processes that run reward functions", at_least=1)
    timeout_s: float = setting(10.0, "seconds a function may take for one sample", above=0)
    memory_limit_mb: int = setting(4096, "MiB of address space of each process", at_least=256)
    retries: int = setting(3, "retries after a transient error of a function, such as a network error", at_least=0)
    concurrency: int = setting(16, "samples that an async function scores concurrently", at_least=1)
    allow_errors: bool = setting(False, "if a function raises, count the sample as unscorable instead of stopping")
    normalize: str = setting(
        "none", "divide by the running standard deviation, or subtract the mean first", choices=("none", "std", "mean_std")
    )
    scale: float = setting(1.0, "factor that multiplies the reward", above=0)
    clip: float | None = setting(None, "clip the reward to plus and minus this; null: off", above=0)
    overlong_penalty: float = setting(0.0, "largest soft penalty of a response near the limit; 0: off", at_least=0)
    overlong_buffer_tokens: int | None = setting(
        None, "tokens before the limit where the penalty starts; null: a fifth of rollout.max_response_tokens", at_least=0
    )


@dataclass
class TrainConfig:
    """How a batch is split into updates."""

    epochs_per_batch: int = setting(1, "passes over each batch", at_least=1)
    minibatches: int = setting(1, "optimizer steps per pass", at_least=1)
    max_tokens_per_microbatch: int | None = setting(
        None,
        "most tokens of a micro-batch on a rank, padding included; null: as many as the memory allows, at most "
        f"{MOST_MICROBATCH_TOKENS}, fixed for the run",
        at_least=1,
    )
    gradient_noise_every: int = setting(
        0,
        "training steps between measurements of the gradient's variance, from two halves of the batch; needs memory for "
        "one more gradient; 0: never",
        at_least=0,
    )

    @property
    def microbatch_tokens(self) -> int:
        """The token budget of a micro-batch; while the setting is null, the default maximum."""
        return self.max_tokens_per_microbatch or MOST_MICROBATCH_TOKENS


@dataclass
class TrainerConfig:
    """The training engine."""

    name: str = setting("deepspeed", "training engine", choices=("deepspeed",))
    zero_stage: int = setting(0, "ZeRO stage: decides which states are sharded over ranks", at_least=0, at_most=3)
    device: str = setting("auto", "device of the models; auto: cuda if available", choices=("auto", "cpu", "cuda"))
    weight_transport: str = setting(
        "auto",
        "how weights reach the rollout engines; auto: shared on one host, ipc on one GPU, else broadcast",
        choices=("auto", "shared", "ipc", "broadcast"),
    )
    checksum_every: int = setting(10, "policy versions between comparisons of every tensor on both sides", at_least=1)
    bucket_mb: int = setting(64, "MiB of weights sent to the rollout engines at a time", at_least=1)


@dataclass
class PlacementConfig:
    """How roles share resources."""

    name: str = setting(
        "colocated",
        "colocated: roles take turns on shared bundles; split: each rank has its own bundle",
        choices=("colocated", "split"),
    )
    takes_turns: bool | None = setting(
        None, "engines sleep while models train, models are offloaded while engines sample; null: only on a shared GPU"
    )
    strategy: str = setting("PACK", "Ray placement strategy", choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
    cpus_per_bundle: float | None = setting(None, "CPUs of a bundle; null: an equal share, at most 8", above=0)
    threads_per_rank: int | None = setting(None, "torch threads of a rank; null: the CPUs of its bundle", at_least=1)


@dataclass
class ClusterConfig:
    """The Ray cluster or process that runs the roles."""

    name: str = setting(
        "local", "local: a private Ray of this run; inline: in this process, without Ray", choices=("local", "inline")
    )
    address: str | None = setting(None, "instead join the Ray cluster at this address (host:port)")
    num_cpus: int | None = setting(None, "CPUs of the private Ray; null: all that this process may use", at_least=1)
    reserve_timeout_s: float = setting(
        30.0, "on a joined cluster: seconds to wait for CPUs and GPUs that other jobs hold", at_least=0
    )
    startup_timeout_s: float = setting(300.0, "seconds within which all roles must be ready", above=0)
    max_restarts: int = setting(3, "how often a dead rollout replica or reward worker is replaced", at_least=0)
    call_timeout_s: float = setting(1800.0, "longest duration of any single call of a role, in seconds", above=0)


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: int = setting(0, "training steps between evaluations; 0: only before and after", at_least=0)
    before_training: bool = setting(True, "evaluate the initial weights, as step 0")
    samples_per_prompt: int = setting(0, "sampled responses per prompt in addition to the greedy one", at_least=0)
    function: str | None = setting(
        None, "verifier for held-out accuracy: a built-in, or path.py:name; null: the first verifier in reward.functions"
    )


@dataclass
class CheckpointConfig:
    """When checkpoints are saved, which are kept, and from which the run resumes."""

    every: int = setting(50, "training steps between checkpoints; 0: only after the last step", at_least=0)
    keep: int = setting(2, "number of newest checkpoints to keep", at_least=1)
    keep_best: int = setting(0, "best checkpoints to keep too, by greedy accuracy on the first held-out set", at_least=0)
    on_signal: bool = setting(True, "on SIGTERM, SIGHUP or Ctrl-C, save the last completed step before ending")
    dir: str | None = setting(None, "folder or address (s3://bucket/path) of the checkpoints; null: in the run's folder")
    resume: str = setting(
        "auto",
        "auto: resume from the newest checkpoint of the run of this name, if any; never; or the path of a checkpoint",
    )


@dataclass
class TrackingConfig:
    """Console output, sample files and trackers, in addition to metrics.jsonl."""

    console: str = setting("auto", "live display, plain lines, or none", choices=("auto", "rich", "plain", "none"))
    samples_every: int = setting(20, "training steps between sample files; 0: none", at_least=0)
    samples_kept: int = setting(8, "rollouts per sample file: best, worst, and others from many prompts", at_least=1)
    sinks: list[str] = setting([], "trackers that also get the metrics: tensorboard, wandb, mlflow")
    project: str = setting("tandem", "project (wandb) or experiment (mlflow) of the run")
    tags: list[str] = setting([], "tags to find the run by")
    wandb: str = setting(
        "auto", "auto: online if WANDB_API_KEY is set, else files for `wandb sync`", choices=("auto", "online", "offline")
    )
    mlflow_uri: str | None = setting(None, "address of an MLflow server; null: files in run.dir/mlruns")


@dataclass
class Config:
    """The whole configuration. Units: a prompt gives `group` samples; a sample is one sequence."""

    adv_estimator: str = setting(
        "gae",
        "advantage estimator; your own: path.py:name; determines whether there is a critic",
        or_path=True,
    )
    dry_run: bool = setting(False, "print the plan and stop")
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def samples_per_step(self) -> int:
        """B = P x G, the number of samples in a training step."""
        return self.prompts_per_step * self.group

    @property
    def group(self) -> int:
        """G, the samples of a prompt; `compose` fills in the setting by the estimator."""
        return self.rollout.samples_per_prompt or GROUP

    @property
    def prompts_per_step(self) -> int:
        """P, the prompts in a training step."""
        return self.data.prompts_per_step or self.data.samples_per_step // self.group

    @property
    def sampling_seed(self) -> int:
        """The seed of sampling."""
        return self.run.seed if self.rollout.seed is None else self.rollout.seed

    @property
    def critic_epochs(self) -> int:
        """The critic's passes over each batch."""
        return self.critic.epochs_per_batch or self.train.epochs_per_batch

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest possible sequence."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def samples_per_minibatch(self) -> int:
        """Samples per optimizer step."""
        return self.samples_per_step // self.train.minibatches

    @property
    def needs_reference(self) -> bool:
        """Whether any KL term is on."""
        return self.algo.kl_reward_coef > 0 or self.algo.kl_loss_coef > 0


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work; the text says what to set."""


def each_setting(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(dotted key, value, metadata) of every leaf setting, in order of declaration."""
    for item in fields(config):
        value, key = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            yield from each_setting(value, key + ".")
        else:
            yield key, value, dict(item.metadata)
