"""Distributions under top-k as pairs of token and probability, which take less memory between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.decoding.rows import join_rows, part_of_rows

TOKEN_BYTES, SHARE_BYTES = 4, 4


@dataclass(frozen=True)
class SparseDistribution:
    """Distributions in which at most k tokens have mass.

    Attributes:
        tokens: [..., k] int32 token ids.
        shares: [..., k] their probabilities.
        vocabulary: V.
    """

    tokens: Tensor
    shares: Tensor
    vocabulary: int

    @classmethod
    def of(cls, distribution: Tensor, count: int) -> SparseDistribution:
        """Keep the `count` likeliest tokens of distributions [..., V], normalised.

        Ties may let top-k keep more tokens than k. The result is then another distribution, so draw from it,
        and not from the one that it was made of.
        """
        shares, tokens = distribution.topk(count, dim=-1)
        total = shares.sum(-1, keepdim=True).clamp_min(torch.finfo(distribution.dtype).tiny)
        return cls(tokens.int(), shares / total, distribution.shape[-1])

    @staticmethod
    def pays(count: int, vocabulary: int, share_bytes: int = SHARE_BYTES) -> bool:
        """Return whether pairs take less memory than dense distributions."""
        return count * (TOKEN_BYTES + share_bytes) < vocabulary * share_bytes

    def dense(self) -> Tensor:
        """Return the dense distributions, [..., V]."""
        zeros = self.shares.new_zeros(*self.shares.shape[:-1], self.vocabulary)
        return zeros.scatter_add(-1, self.tokens.long(), self.shares)  # rows of a smaller k end in zeros

    def nbytes(self) -> int:
        return self.tokens.nbytes + self.shares.nbytes


def unpack(distribution: Tensor | SparseDistribution) -> Tensor:
    """Return distributions as one tensor, [B, n, V]."""
    return distribution.dense() if isinstance(distribution, SparseDistribution) else distribution


def part_of_packed(
    distribution: Tensor | SparseDistribution, rows: Sequence[int]
) -> Tensor | SparseDistribution:
    """Select rows of distributions, [B, n, V] or packed."""
    if isinstance(distribution, SparseDistribution):
        tokens, shares = (part_of_rows(each, rows) for each in (distribution.tokens, distribution.shares))
        return SparseDistribution(tokens, shares, distribution.vocabulary)
    return part_of_rows(distribution, rows)


def join_packed(
    distribution: Tensor | SparseDistribution, other: Tensor | SparseDistribution
) -> Tensor | SparseDistribution:
    """Join the rows of distributions: packed if both are, with the larger k."""
    if not isinstance(distribution, SparseDistribution) or not isinstance(other, SparseDistribution):
        return join_rows(unpack(distribution), unpack(other))
    count = max(distribution.tokens.shape[-1], other.tokens.shape[-1])
    pairs = [
        [pad(values, (0, count - values.shape[-1])) for values in (each.tokens, each.shares)]
        for each in (distribution, other)
    ]
    tokens, shares = (join_rows(*values) for values in zip(*pairs, strict=True))
    return SparseDistribution(tokens, shares, distribution.vocabulary)
