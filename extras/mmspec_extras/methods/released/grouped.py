"""GSD over clusters of codes, and over windows of ranks as in its released code. Lossy by design."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.kernels.groups import bounded_ratio
from mmspec.kernels.ordering import sort_stably
from mmspec.targets import AnyTarget
from mmspec.trees.neighbours import codebook_of, fitted
from mmspec.trees.relaxed_sampling import RelaxedSampling, check_group_size
from mmspec_extras.clusters import cluster_codes

# constants of GSD's released code
RANKS_BELOW, RANKS_ABOVE = 7, 6
LARGEST_DIFFERENCE, LARGEST_SQUARED_DISTANCE = 0.15, 0.5


def cluster_ratio(p: Tensor, q: Tensor, cluster: Tensor) -> Tensor:
    """Return the ratios min(1, P(C) / Q(C)) of fixed clusters C of the K codes; a syntax token is alone.

    Args:
        p, q: [..., V] distributions of target and draft.
        cluster: [K] int64, the cluster of each code, below K.

    Returns:
        [..., V] the ratio of each token's cluster; zero for tokens that p excludes.
    """
    index = torch.arange(p.shape[-1], device=p.device)  # syntax tokens are clusters of their own
    index[: len(cluster)] = cluster
    index = index.expand(p.shape)
    # CUDA sums in any order; float64 removes the differences
    zeros = torch.zeros_like(p, dtype=torch.float64 if p.is_cuda else p.dtype)
    masses = p.to(zeros.dtype), q.where(p > 0, 0.0).to(zeros.dtype)
    ratio = bounded_ratio(*(zeros.scatter_add(-1, index, mass).to(p.dtype) for mass in masses))
    return ratio.gather(-1, index).where(p > 0, 0.0)


def window_ratio(p: Tensor, q: Tensor, codebook: Tensor, x: Tensor | None = None) -> Tensor:
    """Return the ratios min(1, P / Q) over the window of ranks around a token, as in GSD's released code.

    The window has the ascending ranks r - 7 to r + 6, without tokens that differ too much in probability or
    code vector. For r < 7 the ratio is exact, because the released code raises there and falls back. Windows
    overlap, so that they are no partition. Of equally likely tokens, the lower index has the lower rank.

    Args:
        p, q: [..., V] distributions of target and draft.
        codebook: [K, d] code vectors; syntax tokens have none, and count as far from all tokens.
        x: [..., m] int64 tokens; None for all tokens.

    Returns:
        [..., m], or [..., V] without `x`.
    """
    vocabulary, codes = p.shape[-1], len(codebook)
    if x is None:
        x = torch.arange(vocabulary, device=p.device).expand(p.shape)
    vectors = pad(codebook.to(p.dtype), (0, 0, 0, vocabulary - codes), value=float("inf"))  # far from all
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
    """Accepts as `grouped` does; groups are clusters of the code vectors (2508.07747).

    Clusters are made once, in `fit`. According to the paper, they help little.

    Args:
        group_size: mean number of tokens per cluster.

    Raises:
        InputError: a value is out of range.
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
    """Accepts as the released code of GSD does.

    The group of the token of rank r, counted from the lowest, is the ranks r - 7 to r + 6; groups overlap. A
    group keeps tokens whose probability differs by less than 0.15 and whose code vectors lie within a squared
    distance of 0.5. If ranks would be below zero, the test is exact. A token of probability zero may be
    accepted. The released code measures distances in the model's input embedding instead of the codebook. The
    total variation is measured at one verified place a round.
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
