"""What is left of the target's distribution when a candidate is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft


def normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divide by the sum; `otherwise` where all weights are zero (q = p rounds to nothing left)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(weights.dtype).tiny), otherwise)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target still owes after min(p, q) was accepted: norm((p - q)+), [..., V]."""
    return normalise((p - q).clamp_min(0.0), otherwise=p)


def sampled_distribution(draft: Draft) -> Tensor:
    """The draft's q, which the registry has already made sure of."""
    if draft.q is None:
        raise TypeError(
            f"a {draft.kind.value} draft has no q; rejection rules need the distribution it was drawn from"
        )
    return draft.q
