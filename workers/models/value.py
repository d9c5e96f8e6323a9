"""The critic's model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ValueModel(nn.Module):
    """A transformer body with a scalar head: output i is the value after token i.

    The head starts at zero, so the first values are 0 and not noise, or as a copy of a reward model's score head.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.config = body.config
        self.head = nn.Linear(body.config.get_text_config().hidden_size, 1, dtype=body.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def start_from(self, score: nn.Linear) -> None:
        """Copies a score head (1, H) into the value head: the value after a text's last token is then its score."""
        self.head.weight.copy_(score.weight)
        if score.bias is not None:
            self.head.bias.copy_(score.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) float32."""
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.head(hidden).squeeze(-1).float()
