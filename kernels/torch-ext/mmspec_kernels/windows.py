"""Windows of ranks around a token, which GSD's released code takes for groups (2508.07747)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backend import operator, use_triton
from .groups import bounded_ratio
from .ordering import sort_stably

# of GSD's released code
RANKS_BELOW, RANKS_ABOVE = 7, 6
LARGEST_DIFFERENCE, LARGEST_SQUARED_DISTANCE = 0.15, 0.5


@operator(fake=lambda p, q, codebook, x=None: p.new_empty(p.shape if x is None else x.shape))
def window_ratio(p: Tensor, q: Tensor, codebook: Tensor, x: Tensor | None = None) -> Tensor:
    """min(1, P / Q) over the window of ranks around a token, as GSD was released.

    Ascending ranks r - 7 to r + 6, of which those near in probability and in vector space; the
    exact ratio where r < 7, where the released code raises and falls back. Windows overlap: no partition.
    Of equally likely tokens the lower index has the lower rank.

    Args:
        p, q: [..., V] distributions of target and draft.
        codebook: [K, d] vectors of the codes; syntax tokens have none, and are far from all.
        x: [..., m] int64 tokens; all tokens if None. The kernel sorts for all tokens only.

    Returns:
        [..., m], or [..., V].
    """
    if p.dtype != torch.float64 and use_triton(p.device):
        from .windows_triton import window_ratio_at_triton, window_ratio_triton

        return window_ratio_triton(p, q, codebook) if x is None else window_ratio_at_triton(p, q, codebook, x)
    vocabulary, codes = p.shape[-1], len(codebook)
    if x is None:
        x = torch.arange(vocabulary, device=p.device).expand(p.shape)
    vectors = pad(codebook.to(p.dtype), (0, 0, 0, vocabulary - codes), value=float("inf"))  # syntax is far
    _, order = sort_stably(p)
    rank = order.argsort(dim=-1).gather(-1, x)
    p_x, q_x = p.gather(-1, x), q.gather(-1, x)
    target_mass, draft_mass = p_x, q_x
    for offset in (*range(-RANKS_BELOW, 0), *range(1, RANKS_ABOVE + 1)):
        other = order.gather(-1, (rank + offset).clamp(0, vocabulary - 1))
        p_other = p.gather(-1, other)
        gap = (vectors[x] - vectors[other]).square().sum(-1)
        near = ((p_other - p_x).abs() < LARGEST_DIFFERENCE) & (gap < LARGEST_SQUARED_DISTANCE)
        near = near & (rank + offset < vocabulary)
        target_mass = target_mass + p_other.where(near, 0.0)
        draft_mass = draft_mass + q.gather(-1, other).where(near, 0.0)
    exact = rank < RANKS_BELOW
    return bounded_ratio(torch.where(exact, p_x, target_mass), torch.where(exact, q_x, draft_mass))
