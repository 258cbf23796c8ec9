"""Rotary embedding of queries and keys, and the writing of keys and values into a cache, in one launch.

One program per token and head: query heads are rotated, key heads are rotated into the cache beside their
values. Every product is rounded to the dtype of the states, as in transformers' `apply_rotary_pos_emb`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton_without_gradient


@operator(fake=lambda query, *_: query.new_empty(query.shape), mutates=("keys", "values"))
def rotate_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Rotate the halves (a, b) of each head to (a cos - b sin, b cos + a sin) (RoFormer, 2104.09864).

    The rotated keys and the values of token i are written to entry `slots[i]` of the cache.

    Args:
        query: [B, n, heads, d].
        key, value: [B, n, key heads, d].
        cos, sin: [B or 1, n, d] of each token's position.
        slots: [B * n] int64 entries, all different.
        keys, values: [rows, capacity, key heads, d] contiguous buffers with rows * capacity entries.

    Returns:
        [B, n, heads, d] rotated queries.
    """
    dtypes = {each.dtype for each in (query, key, value, cos, sin, keys, values)}
    if len(dtypes) == 1 and query.dtype != torch.float64 and use_triton_without_gradient(query, key, value):
        return rotate_into_cache_triton(query, key, value, cos, sin, slots, keys, values)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    for buffer, states in ((keys, _rotated(key, cos, sin)), (values, value)):
        buffer.flatten(0, 1).index_copy_(0, slots, states.flatten(0, 1))
    return _rotated(query, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@launcher
def rotate_into_cache_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Launch `rotate_into_cache`, with the same arguments."""
    rows, nodes, heads, size = query.shape
    key_heads = key.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel():
        _rotary_kernel[(rows * nodes, heads + key_heads)](
            *(each.contiguous() for each in (query, key, value, cos, sin, slots)),
            keys,
            values,
            out,
            nodes,
            nodes if len(cos) > 1 else 0,
            HEADS=heads,
            KEY_HEADS=key_heads,
            HALF=size // 2,
            BLOCK=triton.next_power_of_2(size // 2),
            num_warps=1,
        )
    return out


@triton.jit
def _rotated_half(x, cos, other, sin, dtype: tl.constexpr):
    """X cos + other sin, every product rounded."""
    return (x * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["nodes", "angle_nodes"])
def _rotary_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    nodes,
    angle_nodes,  # between two rows of cos and sin; 0 if all rows share them
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    angle = (token // nodes * angle_nodes + token % nodes) * 2 * HALF + column
    if head < HEADS:
        source = query_ptr + (token * HEADS + head) * 2 * HALF + column
        target = out_ptr + (token * HEADS + head) * 2 * HALF + column
    else:
        read = (token * KEY_HEADS + head - HEADS) * 2 * HALF + column
        written = (tl.load(slots_ptr + token) * KEY_HEADS + head - HEADS) * 2 * HALF + column
        source, target = key_ptr + read, keys_ptr + written
        for half in tl.static_range(2):
            value = tl.load(value_ptr + read + half * HALF, mask=inside, other=0.0)
            tl.store(values_ptr + written + half * HALF, value, mask=inside)
    first = tl.load(source, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    first = first.to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cos, sin = cos_ptr + angle, sin_ptr + angle
    for half in tl.static_range(2):
        x, other = (first, -second) if half == 0 else (second, first)
        by_cos = tl.load(cos + half * HALF, mask=inside, other=0.0).to(tl.float32)
        by_sin = tl.load(sin + half * HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + half * HALF, _rotated_half(x, by_cos, other, by_sin, dtype), mask=inside)
