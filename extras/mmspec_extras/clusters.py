"""Clusters of the code vectors of an image tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.trees.neighbours import BLOCK_ELEMENTS

ROUNDS = 20


def cluster_codes(codebook: Tensor, count: int) -> Tensor:
    """Return clusters [K] of code vectors [K, d], 0 to count - 1: Lloyd's k-means from evenly spaced codes.

    The result is deterministic. Clusters may have any size, and may be empty.
    """
    vectors = codebook.double()
    centres = vectors[torch.arange(count, device=vectors.device) * len(vectors) // count].clone()
    rows = max(1, BLOCK_ELEMENTS // count)
    cluster = torch.zeros(len(vectors), dtype=torch.long, device=vectors.device)
    for _ in range(ROUNDS):
        cluster = torch.cat([torch.cdist(block, centres).argmin(-1) for block in vectors.split(rows)])
        members = torch.bincount(cluster, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, cluster, vectors)
        centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
    return cluster
