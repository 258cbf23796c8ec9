"""Groups of tokens that are judged together: by the rank of their probability, or by their code vectors.

Groups of GSD (2508.07747). They are a true partition of the tokens that the target allows: only then does the
group test accept at least as much as the exact one, by the triangle inequality.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.errors import InputError
from mmspec.validation import is_integer
from mmspec.verification.neighbours import BLOCK_ELEMENTS

CLUSTERING_ROUNDS = 20
# of GSD's released code
RANKS_BELOW, RANKS_ABOVE = 7, 6
LARGEST_DIFFERENCE, LARGEST_SQUARED_DISTANCE = 0.15, 0.5


def check_group_size(group_size: int) -> None:
    """Raise InputError unless `group_size` is a positive integer."""
    if not is_integer(group_size) or group_size < 1:
        raise InputError("group_size", group_size, "an integer of at least 1; 1 is the exact rule")


def rank_ratio(p: Tensor, q: Tensor, size: int) -> Tensor:
    """[..., V] min(1, P(C) / Q(C)) of each token's group C, groups being the ranks in p divided by `size`.

    Tokens that p excludes are in no group: their ratio is zero, and q's mass on them is not counted.
    """
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    allowed = q.gather(-1, order).where(ordered > 0, 0.0)
    surplus = -p.shape[-1] % size
    sums = [pad(mass, (0, surplus)).unflatten(-1, (-1, size)).sum(-1) for mass in (ordered, allowed)]
    ratio = bounded_ratio(*sums).repeat_interleave(size, -1)[..., : p.shape[-1]]
    return torch.zeros_like(p).scatter(-1, order, ratio.where(ordered > 0, 0.0))


def cluster_ratio(p: Tensor, q: Tensor, cluster: Tensor, count: int) -> Tensor:
    """[..., V] min(1, P(C) / Q(C)) for fixed clusters, [K] from 0 to count - 1; a syntax token is alone."""
    syntax = torch.arange(count, count + p.shape[-1] - len(cluster), device=p.device)
    index = torch.cat([cluster.long(), syntax]).expand(p.shape)
    empty = p.new_zeros(*p.shape[:-1], count + len(syntax))
    sums = [empty.scatter_add(-1, index, mass) for mass in (p, q.where(p > 0, 0.0))]
    return bounded_ratio(*sums).gather(-1, index).where(p > 0, 0.0)


def bounded_ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q); 1 where q is zero, as nothing is drawn there."""
    return torch.where(q > p, p / q.clamp_min(torch.finfo(p.dtype).tiny), 1.0)


def cluster_codes(codebook: Tensor, count: int) -> Tensor:
    """[K] clusters from 0 to count - 1 of code vectors [K, d]: Lloyd's k-means from evenly spaced codes.

    Deterministic; clusters may be of any size, and empty.
    """
    vectors = codebook.double()
    centres = vectors[torch.arange(count, device=vectors.device) * len(vectors) // count].clone()
    rows = max(1, BLOCK_ELEMENTS // count)
    cluster = torch.zeros(len(vectors), dtype=torch.long, device=vectors.device)
    for _ in range(CLUSTERING_ROUNDS):
        cluster = torch.cat([torch.cdist(block, centres).argmin(-1) for block in vectors.split(rows)])
        members = torch.bincount(cluster, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, cluster, vectors)
        centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
    return cluster


def window_ratio(p: Tensor, q: Tensor, codebook: Tensor, x: Tensor) -> Tensor:
    """[..., m] min(1, P / Q) over the window of ranks around tokens x [..., m], as GSD was released.

    Ascending ranks r - 7 to r + 6, of which those near in probability and in vector space; the
    exact ratio where r < 7, where the released code raises and falls back. Windows overlap: no partition.
    """
    vocabulary, codes = p.shape[-1], len(codebook)
    vectors = pad(codebook.to(p.dtype), (0, 0, 0, vocabulary - codes), value=float("inf"))  # syntax is far
    order = p.argsort(dim=-1, stable=True)
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
