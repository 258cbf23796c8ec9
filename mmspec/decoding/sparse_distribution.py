"""Distributions under top-k as pairs of token and probability, which take less memory between rounds.

Logits that equal the k-th let top-k keep more tokens than k. What is drawn from has to be what is kept, or q
is not the distribution of its token: `part_ties` comes before the draw, and pairs then hold all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.decoding.rows import Rows, named

TOKEN_BYTES, SHARE_BYTES = 4, 4


@dataclass(frozen=True)
class SparseDistribution(Rows):
    """Distributions in which at most k tokens have mass.

    Attributes:
        tokens: [..., k] int32 token ids.
        shares: [..., k] their probabilities.
        vocabulary: V.
    """

    row_fields = named("tokens", "shares")

    tokens: Tensor
    shares: Tensor
    vocabulary: int

    @classmethod
    def of(cls, distribution: Tensor, count: int) -> SparseDistribution:
        """Keep the `count` likeliest tokens of distributions [..., V], normalised.

        Where more have mass, the result is another distribution: draw behind `part_ties`.
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

    def with_pairs(self, count: int) -> SparseDistribution:
        """Return the same distributions as `count` pairs, of which the last have no mass."""
        room = (0, count - self.tokens.shape[-1])
        return replace(self, tokens=pad(self.tokens, room), shares=pad(self.shares, room))


def part_ties(p: Tensor, most: float | Tensor) -> Tensor:
    """Leave mass to at most so many tokens of distributions under top-k: of equals, to those of lowest id.

    Which they are depends on the row alone, not on its batch or on where it is computed. Where nothing is
    tied the numbers stay as they are.

    Args:
        p: [B, n, V] in which more than k tokens have mass only if all that are too many equal the k-th.
        most: k, or [B, 1, 1] of the rows; infinite for all.
    """
    has_mass = p > 0
    surplus = has_mass.sum(-1, keepdim=True) - most
    is_least = p == p.where(has_mass, torch.inf).amin(-1, keepdim=True)
    rank = is_least.cumsum(-1, dtype=torch.int32)
    left = p.masked_fill(is_least & (rank > rank[..., -1:] - surplus), 0.0)
    return torch.where(surplus > 0, left / left.sum(-1, keepdim=True), p)


def unpack(distribution: Tensor | SparseDistribution) -> Tensor:
    """Return distributions as one tensor, [B, n, V]."""
    return distribution.dense() if isinstance(distribution, SparseDistribution) else distribution


def packed_alike(
    one: Tensor | SparseDistribution, other: Tensor | SparseDistribution
) -> tuple[Tensor | SparseDistribution, Tensor | SparseDistribution]:
    """Return two distributions in one form: packed with the larger k if both are packed, else as tensors."""
    if not isinstance(one, SparseDistribution) or not isinstance(other, SparseDistribution):
        return unpack(one), unpack(other)
    most = max(one.tokens.shape[-1], other.tokens.shape[-1])
    return one.with_pairs(most), other.with_pairs(most)
