"""The gap between the hf engine's log-probs of its samples and a trainer's."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tandem.platform.algorithms.logprobs import token_logprobs
from tandem.platform.experience.batch import Prompt
from tandem.platform.loop.protocols import Sampling
from tandem.workers.engines.hf import HFEngine

PROMPTS = [Prompt((5, 9, 13, 7, 8, 21, 30), 0, ""), Prompt((11,), 1, ""), Prompt((4, 5, 6), 2, "")]


class Loaded(HFEngine):
    """An engine for a model that is already in memory; only the length limit ends a response."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device, self.max_rows = model.eval(), torch.device("cpu"), 64
        self.stop_ids, self.stop = set(), ()
        self._set_up()


def worst_gap(model: PreTrainedModel) -> float:
    """The largest difference, in nats, between the engine's log-probs and those of a pass over each sequence alone."""
    sampled = Loaded(model).generate(PROMPTS, Sampling(2, 1.0, 6, (0,)))
    gaps = []
    for number, one in enumerate(sampled):
        prompt = PROMPTS[number // 2].ids
        tokens = torch.tensor([[*prompt, *one.ids]])
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        expected = token_logprobs(logits, tokens, 1.0)[0, len(prompt) :]
        gaps.append(float((expected - torch.tensor(one.logprobs)).abs().max()))
    return max(gaps)
