"""Attention of learned queries over the tokens of an image."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mmspec.errors import InputError

__all__ = ["QueryAttention", "masked_softmax"]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis where `mask` is True; padding gets exactly nothing."""
    return scores.masked_fill(~mask, float("-inf")).softmax(-1)


class QueryAttention(nn.Module):
    """Multi-head cross-attention whose queries are parameters.

    Args:
        width: d.
        queries: how many.
        heads: a divisor of the width.

    Raises:
        InputError: the heads do not divide the width.
    """

    def __init__(self, width: int, queries: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise InputError("heads", heads, f"a divisor of the width {width}")
        head_width = width // heads
        self.queries = nn.Parameter(torch.randn(heads, queries, head_width) * head_width**-0.5)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[P, N, d] keys and values, [P, N] mask -> [P, queries, d]."""
        k, v = (
            rearrange(projected, "p n (heads width) -> p heads n width", heads=len(self.queries))
            for projected in (self.k_proj(keys), self.v_proj(values))
        )
        q = self.queries.expand(len(keys), -1, -1, -1)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        output: Tensor = self.o_proj(rearrange(attended, "p heads q width -> p q (heads width)"))
        return output
