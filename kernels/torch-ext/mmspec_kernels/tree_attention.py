"""Attention of the nodes of a draft to the committed tokens of their rows and to one another.

Keys stand in static buffers: those of a row's committed tokens first, then those of the draft; what comes
after is stale. Instead of a mask over all columns the op takes what differs between rows and nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton

LARGEST_KEY = 512  # bytes of a key of one head; more than that spills registers


def _empty(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, lengths: Tensor, visible: Tensor, scale: float
) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)


@operator(fake=_empty)
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, lengths: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Attend from every node to the committed tokens of its row, or the newest of them, and to drafted slots.

    The kernel splits the columns into parts that run side by side and merges them by their normalisers
    (Flash-Decoding, Dao et al. 2023). How many parts depends on shapes alone, never on lengths. Keys of more
    than 512 bytes a head take the torch form.

    Args:
        query: [B, heads, n, d]; consecutive heads share one of the keys' heads.
        key, value: [B, key heads, width, d], any strides.
        first: [B, n or 1] the first committed token that a node sees; above 0 in a sliding window.
        lengths: [B] number of committed tokens; slot s of the draft is column `lengths + s`.
        visible: [B, n or 1, m] not zero where a node sees slot s; `lengths + m` is at most the width.
        scale: of the logits.

    Returns:
        [B, n, heads, d] as the query; zeros for a node that sees nothing.

    Raises:
        ValueError: the heads of keys do not divide those of queries, or keys and values differ in shape.
    """
    rows, heads, nodes, dim = query.shape
    kv_heads, width = key.shape[1:3]
    if heads % kv_heads or key.shape != value.shape:
        raise ValueError(
            f"got {heads} heads of queries, keys {tuple(key.shape)} and values {tuple(value.shape)}; the "
            "heads of keys divide those of queries, and keys and values have one shape"
        )
    if (
        query.dtype != torch.float64
        and query.element_size() * dim <= LARGEST_KEY
        and use_triton(query.device)
    ):
        from .tree_attention_triton import tree_attention_triton

        return tree_attention_triton(query, key, value, first, lengths, visible, scale)
    precise = torch.promote_types(query.dtype, torch.float32)
    column = torch.arange(width, device=query.device)
    slot = (column - lengths[:, None])[:, None]  # [B, 1, width]
    extent = visible.shape[2]
    drafted = visible.bool().gather(2, slot.clamp(0, extent - 1).expand(-1, visible.shape[1], -1))
    drafted = drafted & (slot >= 0) & (slot < extent)
    seen = ((slot < 0) & (column >= first[..., None]) | drafted).expand(rows, nodes, width)[:, None, None]
    # a stale value may be anything, and nothing times NaN is NaN
    value = value.masked_fill(~seen.any(3)[:, 0, 0, None, :, None], 0)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads)).to(precise)  # [B, key heads, group, n, d]
    logits = grouped @ key[:, :, None].to(precise).mT * scale
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0)
    out: Tensor = weights @ value[:, :, None].to(precise)
    return out.to(query.dtype).flatten(1, 2).transpose(1, 2).contiguous()
