"""Groups of tokens that are judged together, and the ratios min(1, P(C) / Q(C)) of their masses.

Groups of GSD (2508.07747): ranks of the probability divided by the group's size, or fixed clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backend import operator, use_triton
from .ordering import sort_stably


@operator(fake=lambda p, q, size: p.new_empty(p.shape))
def rank_ratio(p: Tensor, q: Tensor, size: int) -> Tensor:
    """Ratios of groups of like probability: the ranks in p, largest first, divided by `size`.

    Of equally likely tokens the lower index comes first. Tokens that p excludes are in no group: their ratio
    is zero, and q's mass on them is not counted.

    Args:
        p, q: [..., V] distributions of target and draft.
        size: tokens per group; the last group may have fewer.

    Returns:
        [..., V] the ratio of each token's group.
    """
    if p.dtype != torch.float64 and use_triton(p.device):
        from .groups_triton import rank_ratio_triton

        return rank_ratio_triton(p, q, size)
    return _rank_ratio(p, q, size)


@operator(fake=lambda p, q, x, size: p.new_empty(x.shape))
def rank_ratio_at(p: Tensor, q: Tensor, x: Tensor, size: int) -> Tensor:
    """`rank_ratio` of tokens x [..., m] alone, [..., m]; the kernel does not sort."""
    if p.dtype != torch.float64 and use_triton(p.device):
        from .groups_triton import rank_ratio_at_triton

        return rank_ratio_at_triton(p, q, x, size)
    return _rank_ratio(p, q, size).gather(-1, x)


@operator(fake=lambda p, q, cluster, members, starts: p.new_empty(p.shape))
def cluster_ratio(p: Tensor, q: Tensor, cluster: Tensor, members: Tensor, starts: Tensor) -> Tensor:
    """Ratios of fixed clusters of the K codes; a syntax token is alone.

    Args:
        p, q: [..., V] distributions of target and draft.
        cluster: [K] int64, the cluster of each code.
        members: [K] int64, the codes by cluster.
        starts: [clusters + 1] int64, where in `members` each cluster begins, and K.

    Returns:
        [..., V] the ratio of each token's cluster; zero for tokens that p excludes.
    """
    if p.dtype != torch.float64 and use_triton(p.device):
        from .groups_triton import cluster_ratio_triton

        return cluster_ratio_triton(p, q, members, starts)
    count = len(starts) - 1
    syntax = torch.arange(count, count + p.shape[-1] - len(cluster), device=p.device)
    index = torch.cat([cluster, syntax]).expand(p.shape)
    empty = p.new_zeros(*p.shape[:-1], count + len(syntax))
    sums = [empty.scatter_add(-1, index, mass) for mass in (p, q.where(p > 0, 0.0))]
    return bounded_ratio(*sums).gather(-1, index).where(p > 0, 0.0)


def _rank_ratio(p: Tensor, q: Tensor, size: int) -> Tensor:
    """`rank_ratio` in torch."""
    ordered, order = sort_stably(p, descending=True)
    allowed = q.gather(-1, order).where(ordered > 0, 0.0)
    surplus = -p.shape[-1] % size
    sums = [pad(mass, (0, surplus)).unflatten(-1, (-1, size)).sum(-1) for mass in (ordered, allowed)]
    ratio = bounded_ratio(*sums).repeat_interleave(size, -1)[..., : p.shape[-1]]
    return torch.zeros_like(p).scatter(-1, order, ratio.where(ordered > 0, 0.0))


def bounded_ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q); 1 where q is zero, as nothing is drawn there."""
    return torch.where(q > p, p / q.clamp_min(torch.finfo(p.dtype).tiny), 1.0)
