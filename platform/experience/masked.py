"""Sums, means and whitening over the tokens that a mask selects.

Values outside the mask are never used: they are replaced before any arithmetic, because NaN * 0 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def masked_fill_zero(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where `mask` is True, 0 elsewhere (same shape); the gradient outside the mask is 0."""
    assert values.shape == mask.shape, f"values {tuple(values.shape)} but mask {tuple(mask.shape)}"
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum () of the selected values."""
    return masked_fill_zero(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean () of the selected values; 0 where nothing is selected."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, eps: float = EPS) -> Tensor:
    """Shifts and scales the selected values to mean 0 and sample standard deviation 1 (n - 1); 0 elsewhere.

        w_t = (x_t - mean) / (std + eps)

    A single selected value is returned unchanged, because it has no standard deviation; an empty mask gives zeros.
    """
    count = mask.sum()
    if count <= 1:
        return masked_fill_zero(values, mask)
    selected = values[mask].double()
    deviation = selected - selected.mean()
    std = deviation.square().sum().div(count - 1).sqrt()
    whitened = torch.zeros_like(values)
    whitened[mask] = (deviation / (std + eps)).to(values.dtype)
    return whitened
