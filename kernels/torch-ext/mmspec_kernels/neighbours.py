"""How much probability lies near a token: the mass of its nearest neighbours, within a limit.

The aggregation of LANTERN (2410.03355). A limit holds for prefixes: neighbours are added, nearest first, as
long as their mass stays within it, and the sum stops at the first one that does not fit (m* = 0: none).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from .backend import operator, use_triton

CACHED_ELEMENTS = 2**20  # numbers gathered at once: as many as a processor's cache holds


@operator(fake=lambda p, table, limit=None: p.new_empty(p.shape))
def nearby_mass(p: Tensor, table: Tensor, limit: Tensor | None = None) -> Tensor:
    """Mass of the nearest neighbours of every token: c(x) of LANTERN.

    Args:
        p: [..., V] a distribution over the K codes and then the syntax tokens, which have no neighbours.
        table: [K, k] neighbours, nearest first; of any integer dtype.
        limit: [..., 1] or [..., V] the largest mass added; all k neighbours if None.

    Returns:
        [..., V], zero for syntax tokens.
    """
    size, count = table.shape
    if p.dtype != torch.float64 and use_triton(p.device):
        from .neighbours_triton import nearby_mass_triton

        return nearby_mass_triton(p, table, limit)
    # places last: a neighbour's masses at all places lie side by side
    codes = p[..., :size].reshape(-1, size).T.contiguous()
    if count == 0 or limit is None:
        mass = embedding_bag(table.long(), codes, mode="sum") if count else torch.zeros_like(codes)
    else:
        limit = limit.expand(*p.shape[:-1], -1)[..., :size]
        mass = _prefix_mass(codes, table, limit.reshape(-1, limit.shape[-1]).T)
    return pad(mass.T.reshape(*p.shape[:-1], size), (0, p.shape[-1] - size))


@operator(fake=lambda p, table, x, limit=None: (p.new_empty(x.shape), torch.empty_like(x)))
def nearby_prefix(p: Tensor, table: Tensor, x: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mass of the nearest neighbours of some tokens, and how many were added.

    Args:
        p, table: as of `nearby_mass`.
        x: [..., m] int64 tokens.
        limit: [..., 1] or [..., m] the largest mass added; all k neighbours if None.

    Returns:
        mass: [..., m] that of `nearby_mass` at x, up to rounding.
        count: [..., m] int64, the number m* of neighbours added; none to a syntax token.
    """
    if p.dtype != torch.float64 and use_triton(p.device):
        from .neighbours_triton import nearby_prefix_triton

        return nearby_prefix_triton(p, table, x, limit)
    size, count = table.shape
    ids = table[x.clamp_max(size - 1)].long()
    near = p.gather(-1, ids.flatten(-2)).view(ids.shape)
    added = (x < size)[..., None]
    added = added.expand(ids.shape) if limit is None else added & (near.cumsum(-1) <= limit[..., None])
    return near.where(added, 0.0).sum(-1), added.sum(-1)


def _prefix_mass(codes: Tensor, table: Tensor, limit: Tensor) -> Tensor:
    """[K, M] mass of the longest prefix of each code's neighbours that stays within the limit.

    Args:
        codes: [K, M] masses of the codes at M places.
        table: [K, k].
        limit: [1 or K, M].
    """
    running, kept = torch.zeros_like(codes), torch.zeros_like(codes)
    columns = max(1, CACHED_ELEMENTS // max(1, codes.numel()))
    for block in table.T.split(columns):
        near = codes.index_select(0, block.long().reshape(-1)).view(len(block), *codes.shape)
        prefixes = near.cumsum(0).add_(running)
        kept = torch.maximum(kept, prefixes.where(prefixes <= limit, 0.0).amax(0))
        running = prefixes[-1]
    return kept
