"""How large a micro-batch the memory there is allows. Pure arithmetic over what passes were found to need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.platform.config.schema import MOST_MICROBATCH_TOKENS, Config, ConfigError
from tandem.platform.planning.plan import RolePlan
from tandem.platform.system.text import human_bytes

SHARE = 0.85
"""Of the memory there is, what a plan may use: allocators leave gaps, and the system wants some."""
STEPS = 3  # looks at sizes between one that fits and one that does not

Group = Mapping[str, int]
"""How many ranks of each role share one memory at a time."""


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
    """Bytes of the fullest memory.

    Args:
        groups: the ranks that share one; those that take turns there are a group each. one_process: all are in the process
            that is there already, and compute one after the other.
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
    """The largest number of rows up to `most` that is found to need no more than `usable` bytes; 0: one row does.

    Needs are convex in the rows (of passes whose sizes grow in proportion, the largest counts), so a straight line between
    two sizes promises too little, never too much. Less than `most` is rounded down to a power of two: a little more or less
    memory at the start of a run does not change it.
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
        if size > usable:  # not convex after all
            does_not, high = between, size
        else:
            fits, low = between, size
    return int(2 ** (fits.bit_length() - 1))


def rows_of(config: Config, tokens: int) -> int:
    """Rows of the longest sequences that stand for a micro-batch of so many tokens on the fullest rank.

    Shorter rows of as many tokens need no more: what grows faster than tokens grows with their length.
    """
    there = -(-config.samples_per_step // config.actor.ranks)
    return max(1, min(-(-tokens // config.max_sequence_tokens), there))


def settled_tokens(config: Config, need: Callable[[int], int], room: Room) -> int:
    """The micro-batch that fits, in tokens: as many as by default, or fewer, and at least the longest sequence.

    Args:
        need: rows of the longest sequences in a micro-batch -> bytes of the fullest memory.

    Raises:
        ConfigError: not even one sequence fits; says what it needs, what there is, and what to set.
    """
    longest = config.max_sequence_tokens
    default = max(MOST_MICROBATCH_TOKENS, longest)
    most = rows_of(config, default)
    rows = most_rows(need, room.usable, most)
    if rows == 0:
        raise ConfigError(
            f"train.max_tokens_per_microbatch: one sequence of {longest} tokens needs {human_bytes(need(1))} with all that "
            f"shares the memory of {room.where}, which has {human_bytes(room.usable)} to use of {human_bytes(room.bytes)}. "
            f"{ways_out(config)}, or set train.max_tokens_per_microbatch={longest} to try it all the same"
        )
    return default if rows == most else min(default, rows * longest)


def ways_out(config: Config) -> str:
    """What needs less memory than the smallest micro-batch, as advice."""
    ways = []
    if not config.model.gradient_checkpointing:
        ways.append("set model.gradient_checkpointing=true")
    if config.model.dtype == "float32":
        ways.append("set model.dtype=bfloat16")
    ways.append("lower data.max_prompt_tokens or rollout.max_response_tokens")
    text = ", ".join(ways)
    return text[0].upper() + text[1:]


def smaller_microbatch(config: Config, fits: int | None) -> str:
    """Advice for a run that ran out of memory: which setting to set to what.

    Args:
        fits: tokens that the plan finds room for; None where it could not count.
    """
    now, longest = config.train.microbatch_tokens, config.max_sequence_tokens
    # Micro-batches are never larger than all rows of a rank, whatever is allowed.
    used = min(now, max(longest, -(-config.samples_per_step // config.actor.ranks) * longest))
    # The plan may be wrong where it says that this one fits.
    wanted = min(used // 2, used // 2 if fits is None else fits)
    wanted = max(longest, wanted // longest * longest)
    if wanted >= now:
        least = f"train.max_tokens_per_microbatch={now} is as small as one sequence of {longest} tokens allows"
        return f"{ways_out(config)}: {least}"
    return f"Set train.max_tokens_per_microbatch={wanted} (was {now})"
