"""Distributions under top-k as pairs of token and probability, which take less memory between rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        return zeros.scatter(-1, self.tokens.long(), self.shares)

    def nbytes(self) -> int:
        return self.tokens.nbytes + self.shares.nbytes
