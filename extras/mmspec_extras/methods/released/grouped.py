"""GSD over clusters of codes, and over the windows of ranks of its released code. Lossy by design."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.kernels.groups import bounded_ratio
from mmspec.kernels.ordering import sort_stably
from mmspec.targets import AnyTarget
from mmspec.trees.neighbours import BLOCK_ELEMENTS, codebook_of, fitted
from mmspec.trees.relaxed_sampling import RelaxedSampling, check_group_size

__all__ = ["GroupedCodes", "ReleasedGrouped", "cluster_codes", "cluster_ratio", "window_ratio"]

CLUSTERING_ROUNDS = 20
# of GSD's released code
RANKS_BELOW, RANKS_ABOVE = 7, 6
LARGEST_DIFFERENCE, LARGEST_SQUARED_DISTANCE = 0.15, 0.5


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


def cluster_ratio(p: Tensor, q: Tensor, cluster: Tensor) -> Tensor:
    """Ratios min(1, P(C) / Q(C)) of fixed clusters C of the K codes; a syntax token is alone.

    Args:
        p, q: [..., V] distributions of target and draft.
        cluster: [K] int64, the cluster of each code, below K.

    Returns:
        [..., V] the ratio of each token's cluster; zero for tokens that p excludes.
    """
    index = torch.arange(p.shape[-1], device=p.device)  # syntax tokens are clusters of their own
    index[: len(cluster)] = cluster
    index = index.expand(p.shape)
    # CUDA adds in any order, which float64 rounds away
    zeros = torch.zeros_like(p, dtype=torch.float64 if p.is_cuda else p.dtype)
    masses = p.to(zeros.dtype), q.where(p > 0, 0.0).to(zeros.dtype)
    ratio = bounded_ratio(*(zeros.scatter_add(-1, index, mass).to(p.dtype) for mass in masses))
    return ratio.gather(-1, index).where(p > 0, 0.0)


def window_ratio(p: Tensor, q: Tensor, codebook: Tensor, x: Tensor | None = None) -> Tensor:
    """Ratios min(1, P / Q) over the window of ranks around a token, as GSD was released.

    Ascending ranks r - 7 to r + 6, of which those near in probability and in vector space; the exact ratio
    where r < 7, where the released code raises and falls back. Windows overlap: no partition. Of equally
    likely tokens the lower index has the lower rank.

    Args:
        p, q: [..., V] distributions of target and draft.
        codebook: [K, d] vectors of the codes; syntax tokens have none, and are far from all.
        x: [..., m] int64 tokens; all tokens if None.

    Returns:
        [..., m], or [..., V].
    """
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


@dataclass
class GroupedCodes(RelaxedSampling):
    """As `grouped`, where groups are clusters of the code vectors (2508.07747).

    Clusters are made once. They help little, as the paper says.

    Args:
        group_size: mean tokens per cluster.

    Raises:
        InputError: a value outside its range.
    """

    group_size: int = 14
    clusters: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_group_size(self.group_size)

    def fit(self, target: AnyTarget) -> GroupedCodes:
        rule = copy.copy(self)
        codebook = codebook_of(target).to(target.device)
        rule.clusters = cluster_codes(codebook, -(-len(codebook) // self.group_size))
        return rule

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        return q * cluster_ratio(p, q, fitted(self.clusters))


@dataclass
class ReleasedGrouped(RelaxedSampling):
    """GSD's rule as its released code has it.

    The group of the token of rank r (from below) is ranks r - 7 to r + 6, overlapping with others; of these,
    tokens whose probability differs by less than .15 and whose vectors lie within a squared distance of .5;
    where the ranks would fall below zero the test is exact; a token of probability zero may be accepted.
    Distances are those of the code vectors; the released code takes rows of the model's input embedding. The
    total variation is measured at one judged place a round.
    """

    codebook: Tensor | None = field(default=None, init=False, repr=False)

    measures_one_place = True

    def fit(self, target: AnyTarget) -> ReleasedGrouped:
        rule = copy.copy(self)
        rule.codebook = codebook_of(target).to(target.device)
        return rule

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        if only is not None:
            return torch.zeros_like(p).scatter(-1, only, self.mass_at(p, q, only, allowance))
        return q * window_ratio(p, q, fitted(self.codebook))

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        return q.gather(-1, x) * window_ratio(p, q, fitted(self.codebook), x)
