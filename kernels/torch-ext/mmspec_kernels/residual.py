"""Residuals of speculative sampling, in torch: what a refused candidate leaves of a distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divide weights [..., V] by their sum; `otherwise` where all are zero (q = p rounds to nothing left)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(weights.dtype).tiny), otherwise)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Residual distribution norm((p - q)+), [..., V]: what min(p, q) leaves of p (2211.17192)."""
    return normalise((p - q).clamp_min(0.0), otherwise=p)
