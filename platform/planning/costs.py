"""Floating-point operations of a step by phase. Pure arithmetic.

Counts the multiplications and additions of matrix products, 2 per multiply-add, as in Kaplan et al., Scaling Laws,
https://arxiv.org/abs/2001.08361, section 2.1, plus attention over the context: 4 x layers x width for each pair of a token
and a token it attends to (scores, then values). The causal half is not subtracted, because CPU kernels compute it. Padding
is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine the operations of a decoder."""

    layers: int
    attention_width: int  # query heads x their dimensions
    block_parameters: int  # of all matrices of all layers, without embeddings and head
    head_parameters: int  # of the output layer: hidden size x vocabulary, or hidden size x 1 for a value

    def forward(self, tokens: float, context: float, outputs: float) -> float:
        """Operations of a forward pass.

        Args:
            tokens: tokens that pass through the layers. context: tokens that each of them attends to, summed.
            outputs: tokens at which the head is computed.
        """
        attention = 4 * self.layers * self.attention_width * context
        return 2 * self.block_parameters * tokens + attention + 2 * self.head_parameters * outputs


@dataclass(frozen=True)
class StepSize:
    """The numbers of prompts, samples and tokens in a training step."""

    prompts: float  # prompts that are sampled from
    sampled: float  # samples that are generated
    trained: float  # samples used for inference and updates
    prompt_tokens: float  # mean per prompt
    response_tokens: float  # mean per sample


def step_flops(
    size: StepSize,
    actor: ModelShape,
    critic: ModelShape | None,
    reference: bool,
    epochs: tuple[float, float] = (1.0, 1.0),
    recompute: bool = False,
) -> dict[str, float]:
    """Operations of a step by phase: `generate`, `infer_*`, `update_critic`, `update_actor`.

    Squared lengths are squares of the means. A prompt is read once for all its samples. A training pass costs three forward
    passes, or four if activations are recomputed.

    Args:
        epochs: passes over the batch, of the actor and of the critic.
    """
    length = size.prompt_tokens + size.response_tokens
    tokens, context = size.trained * length, size.trained * length**2
    one_pass = actor.forward(tokens, context, tokens)
    forwards = 4 if recompute else 3
    phases = {"generate": _generation(size, actor), "infer_old": one_pass}
    if reference:
        phases["infer_reference"] = one_pass
    if critic is not None:
        values = critic.forward(tokens, context, tokens)
        phases |= {"infer_values": values, "update_critic": forwards * epochs[1] * values}
    return phases | {"update_actor": forwards * epochs[0] * one_pass}


def _generation(size: StepSize, actor: ModelShape) -> float:
    reading = actor.forward(size.prompts * size.prompt_tokens, size.prompts * size.prompt_tokens**2, size.prompts)
    # The pass over the prompt yields the first token of a response.
    written = max(size.response_tokens - 1, 0.0)
    seen = size.prompt_tokens + (written + 1) / 2  # context of each decoded token, on average
    decoded = size.sampled * written
    return reading + actor.forward(decoded, decoded * seen, decoded)


def share_of_peak(flops: Mapping[str, float], seconds: Mapping[str, float], peak: float) -> dict[str, float]:
    """Achieved share of `peak` (operations per second) by phase; only phases with a measured time."""
    return {phase: count / seconds[phase] / peak for phase, count in flops.items() if seconds.get(phase, 0.0) > 0}


MOST_OTHERS = 0.1
"""Largest share of the cores that other processes may use during a measurement."""
MOST_SPREAD = 0.15
"""Largest relative difference between the best and the median measurement that still counts as chance."""


@dataclass(frozen=True)
class Peak:
    """The machine's rate at matrix products, and how it was measured."""

    flops: float  # operations per second of the best trial
    median: float  # of all trials
    spread: float  # (best - median) / best
    trials: int
    others: float  # share of the cores that other processes used during the trials
    load_average: float  # processes, over the preceding minute

    @staticmethod
    def of(rates: Sequence[float], others: float, load_average: float) -> Peak:
        """Creates a Peak from the operations per second of each trial."""
        best, median = max(rates), statistics.median(rates)
        return Peak(best, median, (best - median) / best, len(rates), others, load_average)

    def problem(self) -> str | None:
        """Why this peak is no valid reference; None if it is valid."""
        if self.others > MOST_OTHERS:
            return f"the peak was measured beside other processes, on {self.others:.0%} of the cores"
        if self.spread > MOST_SPREAD:
            return f"measurements of the peak differ: best {self.flops:.3g}, median {self.median:.3g} operations/s"
        return None


def share_problem(share: float, peak: Peak | None, others: float | None) -> str | None:
    """Why a share of the peak must not be printed; None if it is valid.

    Args:
        peak: how the peak was measured; None if not recorded. others: largest share of the cores that other processes used
            before or after the timed runs; None if not recorded.
    """
    if peak is not None and (problem := peak.problem()):
        return problem
    if others is not None and others > MOST_OTHERS:
        return f"timed beside other processes, on {others:.0%} of the cores"
    if share > 1:
        return "over 100 %, which cannot be: the peak was measured too low, or less was computed than is counted"
    return None
