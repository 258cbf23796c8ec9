"""Residual distributions, which are drawn from when a candidate is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft


def normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divide weights [..., V] by their sum; `otherwise` where all are zero (q = p rounds to nothing left)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(weights.dtype).tiny), otherwise)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Residual distribution norm((p - q)+), [..., V]: what min(p, q) leaves of p (2211.17192)."""
    return normalise((p - q).clamp_min(0.0), otherwise=p)


def sampled_distribution(draft: Draft) -> Tensor:
    """Return the draft's q.

    Raises:
        TypeError: it has none; accelerators are checked for that when they are built.
    """
    if draft.q is None:
        raise TypeError(
            f"a {draft.kind.value} draft has no q; rejection rules need the distribution it was drawn from"
        )
    return draft.q
