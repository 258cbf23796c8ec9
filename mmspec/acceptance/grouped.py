"""GSD: candidates are judged by the mass of a group of tokens. Lossy by design.

Groups are a true partition of the tokens that the target allows: only then does the group test accept at
least as much as the exact one, by the triangle inequality.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.acceptance.neighbours import BLOCK_ELEMENTS, NOT_FITTED, codebook_of
from mmspec.acceptance.relaxed_sampling import RelaxedSampling, check_group_size
from mmspec.decoding.interfaces import Target
from mmspec.errors import InputError
from mmspec.kernels import cluster_ratio, rank_ratio, rank_ratio_at, window_ratio
from mmspec.registry import did_you_mean

PARTITIONS = ("rank", "codebook")
CLUSTERING_ROUNDS = 20


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


class Clusters(NamedTuple):
    """Clusters of the K codes, as `mmspec.kernels.cluster_ratio` reads them.

    Attributes:
        cluster: [K] int64, the cluster of each code.
        members: [K] int64, the codes by cluster.
        starts: [clusters + 1] int64, where in `members` each cluster begins, and K.
    """

    cluster: Tensor
    members: Tensor
    starts: Tensor

    @classmethod
    def sorted(cls, cluster: Tensor, count: int) -> Clusters:
        """Sort the codes by cluster, [K] from 0 to count - 1; those of a cluster stay in order."""
        sizes = torch.bincount(cluster, minlength=count)
        return cls(cluster, cluster.argsort(stable=True), pad(sizes.cumsum(0), (1, 0)))


@dataclass
class Grouped(RelaxedSampling):
    """Accept x with probability min(1, P(C) / Q(C)) for the group C of x, else draw from norm((p - q)+).

    Grouped speculative decoding (2508.07747). For a true partition the
    acceptance is at least the exact one. No bound is known; the total variation is measured at every place.
    `budget` with relaxation="groups" spends a bounded one on the same groups.

    Args:
        group_size: tokens per group, 1 (exact) or more; of clusters, the mean.
        partition: "rank" puts tokens together that are neighbours in the order of their probability, anew at
            every place; "codebook" clusters the code vectors once, which helps little, as the paper says.
        reference: behave as the released code does: the group of the token of rank r (from below) is ranks
            r - 7 to r + 6, overlapping with others; of these, tokens whose probability differs by less than
            .15 and whose vectors lie within a squared distance of .5; where the ranks would fall below zero
            the test is exact; a token of probability zero may be accepted. Distances are those of the code
            vectors; the released code takes rows of the model's input embedding. Group size and partition
            are ignored, and the total variation is measured at one judged place a round.

    Raises:
        InputError: a value outside its range.
    """

    group_size: int = 14
    partition: str = "rank"
    reference: bool = False
    codebook: Tensor | None = field(default=None, init=False, repr=False)
    clusters: Clusters | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        if self.partition not in PARTITIONS:
            raise InputError("partition", self.partition, did_you_mean(self.partition, PARTITIONS))

    def fit(self, target: Target[Any]) -> Grouped:
        if self.partition == "rank" and not self.reference:
            return self
        fitted = copy.copy(self)
        codebook = codebook_of(target).to(target.device)
        if self.reference:
            fitted.codebook = codebook
        else:
            count = -(-len(codebook) // self.group_size)
            fitted.clusters = Clusters.sorted(cluster_codes(codebook, count), count)
        return fitted

    @property
    def measures_one_place(self) -> bool:
        return self.reference

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        if only is not None and (self.reference or self.partition == "rank"):
            return torch.zeros_like(p).scatter(-1, only, self.mass_at(p, q, only, allowance))
        if self.reference:
            return q * window_ratio(p, q, self.vectors)
        if self.partition == "rank":
            return q * rank_ratio(p, q, self.group_size)
        if self.clusters is None:
            raise TypeError(NOT_FITTED)
        return q * cluster_ratio(p, q, *self.clusters)

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        if self.reference:
            return q.gather(-1, x) * window_ratio(p, q, self.vectors, x)
        if self.partition == "rank":
            return q.gather(-1, x) * rank_ratio_at(p, q, x, self.group_size)
        return super().mass_at(p, q, x, allowance)

    @property
    def vectors(self) -> Tensor:
        """[K, d] the code vectors, of the released windows."""
        if self.codebook is None:
            raise TypeError(NOT_FITTED)
        return self.codebook
