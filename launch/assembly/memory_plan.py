"""Plans memory before anything is allocated: what a run needs, what is available, and the micro-batch that fits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import psutil
import torch

from tandem.launch.assembly.roles import placement_here, role_specs, takes_turns, wants_gpu
from tandem.launch.storage.checkpoint import Checkpoint
from tandem.platform.algorithms.registry import Algorithm, algorithm_of
from tandem.platform.config.schema import Config
from tandem.platform.planning.memory import Group, Room, needed, rows_of, settled_tokens, smaller_microbatch
from tandem.platform.planning.plan import RolePlan, role_plans, role_ranks
from tandem.platform.system.text import human_bytes
from tandem.workers.models.footprint import available_bytes
from tandem.workers.models.loading import DTYPES, LOAD_ERRORS, prepared, skeleton, untrained
from tandem.workers.models.value import ValueModel
from tandem.workers.roles.rehearsal import Unknown, sampling_bytes, working_bytes
from tandem.workers.roles.rollout import engine_name

KEY = "train.max_tokens_per_microbatch"
GPU_PROCESS = 512 << 20
"""GPU bytes that a process uses before its first tensor: CUDA's context and kernels."""
TENSORS, GUESSED = 12, 10
"""A rough guess counts TENSORS tensors per width, and is trusted if GUESSED times its bytes are available."""
LARGEST_START = 1 << 30
"""Upper bound in bytes of what a process holds before it loads a model; this process may have loaded models already."""
SMI = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
SMI_TIMEOUT_S = 20.0


def settle(config: Config, found: Checkpoint | None) -> list[str]:
    """Chooses train.max_tokens_per_microbatch if it is null; returns notes for the user.

    A resumed run keeps its first choice on any machine, because another value would change results by rounding.

    Raises:
        ConfigError: not even one sequence fits.
    """
    if config.train.max_tokens_per_microbatch is not None:
        return []
    known = found.settings.get(KEY) if found else None
    if isinstance(known, int):
        config.train.max_tokens_per_microbatch = known
        return []
    config.train.max_tokens_per_microbatch, notes = MemoryPlan(config).fitting()
    return notes


def advice(config: Config, plan: MemoryPlan, what: str) -> str:
    """The settings to change after memory has run out, or may have; empty if no setting of the model helps.

    Args:
        what: the message of the failure.
    """
    if "reward rank" in what:
        return ""
    text = _advice(config, plan, what)
    return f"If memory ran out: {text[0].lower()}{text[1:]}" if "its process ended" in what else text


def _advice(config: Config, plan: MemoryPlan, what: str) -> str:
    if "rollout rank" in what:
        now = config.rollout.max_batch_sequences
        return f"Set rollout.max_batch_sequences={max(1, now // 2)} (was {now})"
    fits = None
    if plan.room is not None:
        whole = replace(config, train=replace(config.train, max_tokens_per_microbatch=None))
        try:
            fits = MemoryPlan(whole, plan.room).fitting()[0]
        except ValueError:  # not even one sequence fits
            fits = config.max_sequence_tokens
        except Exception:  # an error here must never hide the failure being explained
            return smaller_microbatch(config, None)
    return smaller_microbatch(config, fits)


class MemoryPlan:
    """The memory that each role of a run needs, and the memory available when this object is created."""

    def __init__(self, config: Config, room: Room | None = None) -> None:
        self.config, self.problems = config, dict[str, str]()
        self.algorithm = algorithm_of(config)
        self.on_gpu = wants_gpu(config, torch.cuda.is_available())
        self.room = room or room_of(config, self.on_gpu)
        self._process = GPU_PROCESS if self.on_gpu else min(int(psutil.Process().memory_info().rss), LARGEST_START)

    def fitting(self) -> tuple[int, list[str]]:
        """The micro-batch to use if none is set, in tokens, and notes for the user.

        Raises:
            ConfigError: not even one sequence fits.
        """
        config, most = self.config, self.config.train.microbatch_tokens
        if self.room is None or not self._has_model:
            return max(most, config.max_sequence_tokens), []
        if self._fits_roughly(most):
            return max(most, config.max_sequence_tokens), []
        tokens = settled_tokens(config, self._needed, self.room)
        if self.problems:
            return tokens, [f"warning: {problem}" for problem in self.notes()]
        if tokens < most:
            return tokens, [f"{KEY}={tokens}: this fits into {human_bytes(self.room.usable)} of {self.room.where}"]
        return tokens, []

    def roles(self) -> list[RolePlan]:
        """The plans of the roles at the micro-batch of the settings."""
        return self._roles(rows_of(self.config, self.config.train.microbatch_tokens))

    def notes(self) -> list[str]:
        """Notes on available memory and on roles that could not be counted."""
        where = [] if self.room is None else [f"available: {human_bytes(self.room.bytes)} of memory on {self.room.where}"]
        return where + [
            f"the passes of the {role} are not counted: its model cannot run on fake tensors ({why}). Watch "
            f"memory/{role}/peak_bytes, and set {KEY} by hand if the peak is too high"
            for role, why in self.problems.items()
        ]

    def _needed(self, rows: int) -> int:
        return needed(self._roles(rows), self._groups, self.config.cluster.name == "inline")

    def _fits_roughly(self, tokens: int) -> bool:
        """Whether the default micro-batch fits if every pass needs as much per token as the actor's update. This takes one
        rehearsal or none instead of four, and suffices if memory is plentiful.

        It is an upper bound: per token and layer, an update keeps more than a cache or a pass without gradients.
        """
        if self.config.critic.path is not None or self.on_gpu or self.room is None:
            return False
        rows = rows_of(self.config, tokens)
        guess = rows * self.config.max_sequence_tokens * self._token_guess
        if guess * GUESSED <= self.room.usable and self._fits(guess, rows):
            return True
        update = self._working("actor", rows)
        return update is not None and self._fits(update, rows)

    def _fits(self, update: int, rows: int) -> bool:
        """Whether everything fits if an update of `rows` rows takes `update` bytes and no pass takes more per row."""
        assert self.room is not None, "the available memory is unknown"
        config, rollout = self.config, self.config.rollout
        engine = -(-update * min(rollout.max_batch_sequences, config.samples_per_step) // rows)
        if engine_name(rollout.engine, self.on_gpu) == "vllm":
            engine = self._engine
        working = {**dict.fromkeys(self._specs, update), "rollout": engine, "reward": 0}
        plans = role_plans(config, self.algorithm, self.parameters, working, self._process)
        return needed(plans, self._groups, config.cluster.name == "inline") <= self.room.usable

    def _roles(self, rows: int) -> list[RolePlan]:
        working = {role: self._working(role, rows) for role in self._specs}
        return role_plans(self.config, self.algorithm, self.parameters, working, self._process)

    def _working(self, role: str, rows: int) -> int | None:
        """Bytes of the role's largest pass on a rank; None if they cannot be counted."""
        width = self.config.max_sequence_tokens
        spec, make = self._specs[role], maker(self.config, is_critic=role == "critic")
        try:
            if role == "reward":
                return 0
            if role == "rollout":
                return self._engine
            return working_bytes(spec, make, rows, width, train=role != "reference")
        except Unknown as error:
            self.problems[role] = str(error)
            return None

    @cached_property
    def _engine(self) -> int:
        """Bytes of the rollout engine, not counting its weights."""
        config, spec = self.config, self._specs["rollout"]
        rollout = config.rollout
        if engine_name(rollout.engine, self.on_gpu) == "vllm":
            if not self.on_gpu:
                return int(rollout.kv_cache_gb * 2**30)
            share = int((self.room.bytes if self.room else 0) * rollout.gpu_memory_share)
            return max(0, share - self.parameters * DTYPES[config.model.dtype].itemsize)
        prompts = -(-config.prompts_per_step // rollout.replicas)
        rows = min(rollout.max_batch_sequences, prompts * config.group)
        prompts = min(prompts, -(-rows // config.group))
        lengths = (config.data.max_prompt_tokens, rollout.max_response_tokens)
        return sampling_bytes(spec, maker(config), prompts, rows, lengths)

    @cached_property
    def _specs(self) -> Mapping[str, Any]:
        return role_specs(self.config, self.algorithm, self.config.model.path or "")

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(parameter.numel() for parameter in self._skeleton.parameters())

    @cached_property
    def _token_guess(self) -> int:
        """A high guess of the bytes per token in an update: TENSORS float32 tensors as wide as both sides of every matrix
        and the scores of every head.
        """
        widths = sum(sum(p.shape) for p in self._skeleton.parameters() if p.dim() == 2)
        text = self._skeleton.config.get_text_config()
        heads = getattr(text, "num_hidden_layers", 1) * getattr(text, "num_attention_heads", 1)
        return 4 * TENSORS * int(widths + heads * self.config.max_sequence_tokens)

    @property
    def _has_model(self) -> bool:
        """Whether the model can be planned for. If not, the model checks report the problem with a better message."""
        try:
            return self._skeleton is not None
        except LOAD_ERRORS:
            return False

    @cached_property
    def _skeleton(self) -> Any:
        return empty_model(self.config)

    @cached_property
    def _groups(self) -> list[Group]:
        return groups_of(self.config, self.algorithm, self.on_gpu)


def groups_of(config: Config, algorithm: Algorithm, on_gpu: bool) -> list[Group]:
    """The groups of ranks that share memory at the same time. On CPU, all ranks are one group. On GPUs, the ranks of each
    bundle with a GPU are a group; if engines take turns with the trained models, the engines are a group of their own.
    """
    if not on_gpu or config.cluster.name == "inline":
        return [role_ranks(config, algorithm)]
    placement, turns = placement_here(config, algorithm, on_gpu=True), takes_turns(config, True)
    groups: list[dict[str, int]] = []
    for number in range(len(placement.bundles)):
        tenants = [slot.role for slot in placement.slots if slot.bundle == number and slot.gpus]
        group = {role: tenants.count(role) for role in tenants}
        if turns:
            groups += [{role: count for role, count in group.items() if (role == "rollout") == alone} for alone in (0, 1)]
        else:
            groups.append(group)
    return [group for group in groups if group]


def room_of(config: Config, on_gpu: bool) -> Room | None:
    """The memory that the run's processes share; None if unknown, as for a joined cluster."""
    if config.cluster.address is not None:
        return None
    if not on_gpu:
        return Room(available_bytes(), "this machine")
    try:
        output = subprocess.run(SMI, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT_S).stdout
        return Room(min(int(line) for line in output.split()) << 20, "each GPU")
    except (OSError, ValueError, subprocess.SubprocessError):  # no fallback to torch, which would allocate GPU memory
        return None


def maker(config: Config, *, is_critic: bool = False) -> Callable[[], Any]:
    """A function that creates the model of a role, with arbitrary weights."""
    path = (config.critic.path if is_critic else None) or config.model.path

    def make() -> Any:
        if path is not None:
            model = untrained(path, config.model, body=is_critic)
        else:
            with _default_dtype(DTYPES[config.model.dtype]):
                whole = prepared(_embedded(config), config.model)
            model = whole.model if is_critic else whole
        return ValueModel(model) if is_critic else model

    return make


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def empty_model(config: Config) -> Any:
    """The model on the meta device, created from its config without loading weights."""
    with torch.device("meta"):
        return _embedded(config) if config.model.path is None else skeleton(config.model.path, config.model)


def _embedded(config: Config) -> Any:
    from tandem.platform.data.tasks import load_task
    from tandem.workers.models.tiny import character_tokenizer, tiny_model

    return tiny_model(config.model.tiny, character_tokenizer(load_task(config.task).characters))
