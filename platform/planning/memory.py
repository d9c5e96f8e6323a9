"""The largest micro-batch that fits into memory. Pure arithmetic on the measured needs of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.platform.config.schema import MOST_MICROBATCH_TOKENS, Config, ConfigError
from tandem.platform.planning.plan import RolePlan
from tandem.platform.system.text import human_bytes

SHARE = 0.85
"""Share of the memory that a plan may use: allocators leave gaps, and the system needs some."""
STEPS = 3  # sizes tried between one that fits and one that does not

Group = Mapping[str, int]
"""Number of ranks of each role that share one memory at the same time."""


@dataclass(frozen=True)
class Room:
    """Memory that the processes of a run share."""

    bytes: int
    where: str  # "this machine", "each GPU"

    @property
    def usable(self) -> int:
        """Bytes that a plan may use."""
        return int(self.bytes * SHARE)


def needed(plans: Sequence[RolePlan], groups: Sequence[Group], one_process: bool) -> int:
    """Bytes needed in the fullest memory.

    Args:
        groups: ranks that share a memory; ranks that take turns are separate groups. one_process: all ranks are in this
            process and compute one after another.
    """
    by_name = {plan.name: plan for plan in plans}
    sizes = []
    for group in groups:
        ranks = [(by_name[name], count) for name, count in group.items() if name in by_name]
        if one_process:
            working = max(plan.working or 0 for plan, _ in ranks)
            sizes.append(sum(plan.held for plan, _ in ranks) + working)
        else:
            sizes.append(sum(count * plan.bytes_per_rank for plan, count in ranks))
    return max(sizes, default=0)


def most_rows(need: Callable[[int], int], usable: int, most: int) -> int:
    """A number of rows up to `most` that needs at most `usable` bytes; 0 if even one row needs more.

    The need is convex in the rows (a maximum over passes whose sizes grow linearly), so linear interpolation between two
    sizes never overestimates the rows that fit. A result below `most` is rounded down to a power of two, so slightly
    different free memory at the start of a run does not change it.
    """
    high = need(most)
    if high <= usable:
        return most
    fits, does_not, low = 1, most, need(1) if most > 1 else high
    if low > usable:
        return 0
    for _ in range(STEPS):
        between = fits + int((does_not - fits) * (usable - low) / max(high - low, 1))
        if between <= fits:
            break
        size = need(between)
        if size > usable:  # the need was not convex
            does_not, high = between, size
        else:
            fits, low = between, size
    return int(2 ** (fits.bit_length() - 1))


def rows_of(config: Config, tokens: int) -> int:
    """Number of longest sequences that represents a micro-batch of `tokens` tokens on the fullest rank.

    Shorter rows with as many tokens need no more memory: superlinear terms grow with the length of a row.
    """
    rows_per_rank = -(-config.samples_per_step // config.actor.ranks)
    return max(1, min(-(-tokens // config.max_sequence_tokens), rows_per_rank))


def settled_tokens(config: Config, need: Callable[[int], int], room: Room) -> int:
    """The micro-batch that fits, in tokens: the default or fewer, but at least the longest sequence.

    Args:
        need: number of longest sequences in a micro-batch -> bytes of the fullest memory.

    Raises:
        ConfigError: not even one sequence fits; the text gives the needed and the usable memory, and what to set.
    """
    longest = config.max_sequence_tokens
    default = max(MOST_MICROBATCH_TOKENS, longest)
    most = rows_of(config, default)
    rows = most_rows(need, room.usable, most)
    if rows == 0:
        raise ConfigError(
            f"train.max_tokens_per_microbatch: one sequence of {longest} tokens, with everything else in the memory of "
            f"{room.where}, needs {human_bytes(need(1))}, but {human_bytes(room.usable)} of {human_bytes(room.bytes)} are "
            f"usable. {ways_out(config)}, or set train.max_tokens_per_microbatch={longest} to try it anyway"
        )
    return default if rows == most else min(default, rows * longest)


def ways_out(config: Config) -> str:
    """Advice on settings that save memory when the smallest micro-batch does not fit."""
    ways = []
    if not config.model.gradient_checkpointing:
        ways.append("set model.gradient_checkpointing=true")
    if config.model.dtype == "float32":
        ways.append("set model.dtype=bfloat16")
    ways.append("lower data.max_prompt_tokens or rollout.max_response_tokens")
    text = ", ".join(ways)
    return text[0].upper() + text[1:]


def smaller_microbatch(config: Config, fits: int | None) -> str:
    """Advice for a run that ran out of memory: a setting and its new value.

    Args:
        fits: tokens that fit according to the plan; None if the plan could not count.
    """
    current, longest = config.train.microbatch_tokens, config.max_sequence_tokens
    # A micro-batch never has more rows than its rank, even if the setting allows more.
    used = min(current, max(longest, -(-config.samples_per_step // config.actor.ranks) * longest))
    # The plan is wrong if it claims that the current micro-batch fits, so the advice is at most half of it.
    wanted = min(used // 2, used // 2 if fits is None else fits)
    wanted = max(longest, wanted // longest * longest)
    if wanted >= current:
        least = f"train.max_tokens_per_microbatch={current} is as small as one sequence of {longest} tokens allows"
        return f"{ways_out(config)}: {least}"
    return f"Set train.max_tokens_per_microbatch={wanted} (was {current})"
