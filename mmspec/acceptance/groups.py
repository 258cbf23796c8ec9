"""Groups of tokens that are judged together: their size, and clusters of code vectors.

Groups of GSD (2508.07747), whose ratios are ops of `mmspec.kernels`. They are a true partition of the tokens
that the target allows: only then does the group test accept at least as much as the exact one, by the
triangle inequality.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.acceptance.neighbours import BLOCK_ELEMENTS
from mmspec.errors import InputError
from mmspec.validation import is_integer

CLUSTERING_ROUNDS = 20


def check_group_size(group_size: int) -> None:
    """Raise InputError unless `group_size` is a positive integer."""
    if not is_integer(group_size) or group_size < 1:
        raise InputError("group_size", group_size, "an integer of at least 1; 1 is the exact rule")


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
