"""Norms of heads, rotary embedding of queries and keys, and writing keys and values to a cache: one launch.

One program per token and head: query heads are rotated, key heads are rotated into the cache beside their
values. Roundings are those of transformers' modules: after every product in the dtype of the states, or once
if the angles are float32 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from .backend import launcher, operator, tl, triton, use_triton_without_gradient
from .rms_norm import rms_norm

NORMS = ("none", "rms", "centered", "layer")


@operator(fake=lambda query, *_, **__: query.new_empty(query.shape), mutates=("keys", "values"))
def rotate_into_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: list[Tensor],
    norm: str = "none",
    eps: float = 0.0,
    pairs: bool = False,
) -> Tensor:
    """Rotate the halves (a, b) of each head to (a cos - b sin, b cos + a sin) (RoFormer, 2104.09864).

    The rotated keys and the values of token i are written to entry `slots[i]` of the cache.

    Args:
        query: [B, n, heads, d].
        key, value: [B, n, key heads, d].
        cos, sin: [B or 1, n, d] of each token's position; [B or 1, n, d / 2] of `pairs`.
        slots: [B * n] int64 entries, all different.
        keys, values: [rows, capacity, key heads, d] contiguous buffers with rows * capacity entries.
        weights: of the norm: none; [d] of queries and of keys; or four of [heads, d], scales and then shifts.
        norm: of each head before the rotation: "none"; "rms" and "centered" (`rms_norm`); or "layer", a
            LayerNorm with weights for each head.
        eps: of the norm.
        pairs: whether a and b are the even and odd elements, which are rotated in the dtype of cos.

    Returns:
        [B, n, heads, d] rotated queries.
    """
    states = {each.dtype for each in (query, key, value, keys, values, *weights)}
    angles = torch.float32 if pairs else query.dtype
    is_known = states == {query.dtype} != {torch.float64} and cos.dtype == sin.dtype == angles
    if is_known and use_triton_without_gradient(query, key, value, *weights):
        given = query, key, value, cos, sin, slots, keys, values, weights
        return rotate_into_cache_triton(*given, norm, eps, pairs)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rotated = _rotated_pairs if pairs else _rotated
    key = rotated(_normed(key, norm, weights[1::2], eps), cos, sin)
    for buffer, written in ((keys, key), (values, value)):
        buffer.flatten(0, 1).index_copy_(0, slots, written.flatten(0, 1))
    return rotated(_normed(query, norm, weights[::2], eps), cos, sin)


def _normed(x: Tensor, norm: str, weights: Sequence[Tensor], eps: float) -> Tensor:
    if norm == "none":
        return x
    if norm == "layer":
        scale, shift = weights
        return layer_norm(x, x.shape[-1:], eps=eps) * scale + shift
    return rms_norm(x, weights[0], eps, norm == "centered")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return turned.flatten(-2).to(x.dtype)


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
    weights: list[Tensor],
    norm: str,
    eps: float,
    pairs: bool,
) -> Tensor:
    """Launch `rotate_into_cache`, with the same arguments."""
    rows, nodes, heads, size = query.shape
    key_heads = key.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.numel():
        (query, query_stride), (key, key_stride), (value, value_stride) = map(_tokens, (query, key, value))
        parts = [each.contiguous() for each in weights]
        _rotary_kernel[(rows * nodes, heads + key_heads)](
            query,
            key,
            value,
            *(each.contiguous() for each in (cos, sin, slots)),
            keys,
            values,
            out,
            *parts,
            *[None] * (4 - len(parts)),
            nodes,
            nodes if len(cos) > 1 else 0,
            query_stride,
            key_stride,
            value_stride,
            HEADS=heads,
            KEY_HEADS=key_heads,
            HALF=size // 2,
            BLOCK=triton.next_power_of_2(size // 2),
            PAIRS=pairs,
            NORM=NORMS.index(norm),
            EPS=eps,
            num_warps=1,
        )
    return out


def _tokens(x: Tensor) -> tuple[Tensor, int]:
    """Return [B, n, heads, d] and its stride between tokens; slices of merged projections are not copied."""
    rows, nodes, _, size = x.shape
    stride = x.stride(1) if nodes > 1 else x.stride(0)
    is_even = rows == 1 or nodes == 1 or x.stride(0) == nodes * stride
    if x.stride()[2:] == (size, 1) and is_even:
        return x, stride
    return x.contiguous(), x.shape[2] * size


@triton.jit
def _rotated_part(x, cos, other, sin, dtype: tl.constexpr):
    """X cos + other sin, every product rounded."""
    return (x * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)


@triton.jit
def _scaled(x, scale_ptr, shift_ptr, at, inside, dtype: tl.constexpr, NORM: tl.constexpr):
    """The product of a normalised part and its weights, plus their shift."""
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if NORM == 2:
        return (x * (1.0 + scale)).to(dtype).to(tl.float32)
    x = (x.to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
    if NORM == 3:
        x += tl.load(shift_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x


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
    query_scale_ptr,  # None without a norm
    key_scale_ptr,
    query_shift_ptr,  # None unless NORM is that of layers
    key_shift_ptr,
    nodes,
    angle_nodes,  # between two rows of cos and sin; 0 if all rows share them
    query_stride,  # between tokens
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,  # index in NORMS
    EPS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    # where the two numbers that are rotated together stand in a head
    a = 2 * column if PAIRS else column
    b = a + 1 if PAIRS else column + HALF
    if head < HEADS:
        source = query_ptr + token * query_stride + head * 2 * HALF
        target = out_ptr + (token * HEADS + head) * 2 * HALF
    else:
        written = (tl.load(slots_ptr + token) * KEY_HEADS + head - HEADS) * 2 * HALF
        source = key_ptr + token * key_stride + (head - HEADS) * 2 * HALF
        target = keys_ptr + written
        read = value_ptr + token * value_stride + (head - HEADS) * 2 * HALF
        for half in tl.static_range(2):
            at = column + half * HALF
            tl.store(values_ptr + written + at, tl.load(read + at, mask=inside, other=0.0), mask=inside)
    first = tl.load(source + a, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    first = first.to(tl.float32)
    second = tl.load(source + b, mask=inside, other=0.0).to(tl.float32)
    if NORM != 0:
        if NORM == 3:
            mean = tl.sum(first + second) / (2 * HALF)
            first, second = tl.where(inside, first - mean, 0.0), tl.where(inside, second - mean, 0.0)
        factor = tl.rsqrt(tl.sum(first * first + second * second) / (2 * HALF) + EPS)
        first, second = first * factor, second * factor
        if head < HEADS:
            by = head * 2 * HALF if NORM == 3 else 0
            first = _scaled(first, query_scale_ptr, query_shift_ptr, by + a, inside, dtype, NORM)
            second = _scaled(second, query_scale_ptr, query_shift_ptr, by + b, inside, dtype, NORM)
        else:
            by = (head - HEADS) * 2 * HALF if NORM == 3 else 0
            first = _scaled(first, key_scale_ptr, key_shift_ptr, by + a, inside, dtype, NORM)
            second = _scaled(second, key_scale_ptr, key_shift_ptr, by + b, inside, dtype, NORM)
    angle = token // nodes * angle_nodes + token % nodes
    if PAIRS:
        cos = tl.load(cos_ptr + angle * HALF + column, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + angle * HALF + column, mask=inside, other=0.0)
        tl.store(target + a, first * cos - second * sin, mask=inside)
        tl.store(target + b, second * cos + first * sin, mask=inside)
    else:
        for half in tl.static_range(2):
            x, other = (first, -second) if half == 0 else (second, first)
            at = angle * 2 * HALF + column + half * HALF
            cos = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(target + column + half * HALF, _rotated_part(x, cos, other, sin, dtype), mask=inside)
