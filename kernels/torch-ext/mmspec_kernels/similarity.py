"""Which vectors are most alike, and the means of those that are merged: steps of bipartite soft matching."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .backend import operator, use_triton


@operator(
    fake=lambda a, b, mask: (
        a.new_empty(a.shape[:-1], dtype=torch.float32),
        a.new_empty(a.shape[:-1], dtype=torch.int64),
    )
)
def most_similar(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Most similar vector of another set, by cosine, for each vector of a set.

    The kernel never holds the matrix of similarities. It has no gradient.

    Args:
        a: [P, n, d].
        b: [P, m, d].
        mask: [P, m] bool, which of b there are.

    Returns:
        similarity: [P, n] float32; -inf where b is empty.
        index: [P, n] int64 into b, the lowest of equally similar ones; 0 where b is empty.
    """
    if a.dtype != torch.float64 and use_triton(a.device):
        from .similarity_triton import most_similar_triton

        return most_similar_triton(a, b, mask)
    if not b.shape[1]:
        empty = a.new_full(a.shape[:-1], float("-inf"), dtype=torch.float32)
        return empty, torch.zeros_like(empty, dtype=torch.int64)
    precise = torch.promote_types(a.dtype, torch.float32)
    unit = [normalize(each.to(precise), dim=-1) for each in (a, b)]
    similarity = (unit[0] @ unit[1].mT).masked_fill(~mask[:, None], float("-inf"))
    index = similarity.argmax(-1)
    return similarity.gather(-1, index[..., None])[..., 0].float(), index


@operator(
    fake=lambda values, weights, target, count: (
        values.new_empty(len(values), count, values.shape[-1]),
        weights.new_empty(len(values), count),
    )
)
def merge_vectors(values: Tensor, weights: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Weighted means of vectors that are merged into the same one.

    The torch form has gradients to `values`, and runs wherever one is wanted.

    Args:
        values: [P, N, d].
        weights: [P, N] float32, positive.
        target: [P, N] int64 from 0 to count - 1, what each vector becomes part of; -1 for none.
        count: C.

    Returns:
        mean: [P, C, d]; zero where nothing was merged.
        total: [P, C] float32, the sums of the weights.
    """
    graded = torch.is_grad_enabled() and values.requires_grad
    if values.dtype != torch.float64 and not graded and use_triton(values.device):
        from .similarity_triton import merge_vectors_triton

        return merge_vectors_triton(values, weights, target, count)
    precise = torch.promote_types(values.dtype, torch.float32)
    kept = target >= 0
    slot, weight = target.where(kept, 0), weights.where(kept, 0.0)
    total = torch.zeros_like(weights[:, :1]).expand(-1, count).scatter_add(1, slot, weight)
    share = (weight / total.gather(1, slot).where(kept, 1.0)).to(precise)
    parts = (share[..., None] * values.to(precise)).where(kept[..., None], 0.0)
    mean = values.new_zeros(len(values), count, values.shape[-1], dtype=precise)
    mean = mean.scatter_add(1, slot[..., None].expand_as(values), parts)
    return mean.to(values.dtype), total
