"""Triton kernels of `windows.py` and their launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import planes
from .selection_triton import bounded_ratio, key_value, merge_selected, select
from .windows import LARGEST_DIFFERENCE, LARGEST_SQUARED_DISTANCE, RANKS_ABOVE, RANKS_BELOW

RANKS = 64  # tokens whose windows one program sums up


@triton.jit
def _window_merge_kernel(
    taken_ptr,
    p_ptr,
    q_ptr,
    codebook_ptr,  # [codes, dimensions]
    x_ptr,
    out_ptr,  # as x
    places,
    tokens,
    p_batch_stride,
    p_place_stride,
    q_batch_stride,
    q_place_stride,
    tiles,
    codes,
    dimensions,
    difference,
    distance,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    place = node // tokens
    batch, place = place // places, place % places
    taken = merge_selected(taken_ptr, node, tiles, BELOW, ABOVE, WIDTH, SLOTS)
    lane = tl.arange(0, WIDTH)
    exists = taken >= 0
    windowed = tl.sum((exists & (lane < BELOW)).to(tl.int32), 0) == BELOW  # else the exact rule
    x = tl.load(x_ptr + node)
    p_x = tl.load(p_ptr + batch * p_batch_stride + place * p_place_stride + x).to(tl.float32)
    q_row = q_ptr + batch * q_batch_stride + place * q_place_stride
    p, index = key_value(taken), taken & 0xFFFFFFFF
    others = tl.where(windowed, tl.where(x < codes, codes, 0), 0)  # how many codes may be near
    near = exists & (index < others) & (tl.abs(p - p_x) < difference)
    own_dimensions = tl.where(x < codes, dimensions, 0)
    gap = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, dimensions, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < dimensions
        own = tl.load(codebook_ptr + x * dimensions + column, mask=column < own_dimensions, other=0.0)
        other = tl.load(
            codebook_ptr + index[:, None] * dimensions + column[None, :],
            mask=near[:, None] & inside[None, :],
            other=0.0,
        )
        apart = own.to(tl.float32)[None, :] - other.to(tl.float32)
        gap += tl.sum(apart * apart, 1)
    near = near & (gap < distance)
    q = tl.load(q_row + index, mask=near, other=0.0).to(tl.float32)
    q_x = tl.load(q_row + x).to(tl.float32)
    ratio = bounded_ratio(p_x + tl.sum(tl.where(near, p, 0.0), 0), q_x + tl.sum(q, 0))
    tl.store(out_ptr + node, ratio)


@triton.jit
def _windows_kernel(
    ordered_ptr,  # [batch * places, vocabulary] rising
    order_ptr,  # as ordered
    q_ptr,  # [batch, places, vocabulary] with two strides
    codebook_ptr,  # [codes, dimensions]
    out_ptr,  # as ordered
    places,
    q_batch_stride,
    q_place_stride,
    vocabulary,
    codes,
    dimensions,
    difference,
    distance,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    q_row = q_ptr + place // places * q_batch_stride + place % places * q_place_stride
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    inside = rank < vocabulary
    ordered_ptr += place * vocabulary
    order_ptr += place * vocabulary
    x = tl.load(order_ptr + rank, mask=inside, other=0)
    p_x = tl.load(ordered_ptr + rank, mask=inside, other=0.0).to(tl.float32)
    p_sum = p_x
    q_sum = tl.load(q_row + x, mask=inside, other=0.0).to(tl.float32)
    for step in range(BELOW + ABOVE):
        other_rank = rank - BELOW + step + (step >= BELOW)
        near = inside & (rank >= BELOW) & (other_rank < vocabulary) & (x < codes)
        index = tl.load(order_ptr + other_rank, mask=near, other=0)
        p = tl.load(ordered_ptr + other_rank, mask=near, other=0.0).to(tl.float32)
        near = near & (index < codes) & (tl.abs(p - p_x) < difference)
        gap = tl.zeros([RANKS], dtype=tl.float32)
        for start in range(0, dimensions, BLOCK):
            column = start + tl.arange(0, BLOCK)
            loaded = near[:, None] & (column < dimensions)[None, :]
            own = tl.load(codebook_ptr + x[:, None] * dimensions + column[None, :], mask=loaded, other=0.0)
            other = tl.load(
                codebook_ptr + index[:, None] * dimensions + column[None, :], mask=loaded, other=0.0
            )
            apart = own.to(tl.float32) - other.to(tl.float32)
            gap += tl.sum(apart * apart, 1)
        near = near & (gap < distance)
        p_sum += tl.where(near, p, 0.0)
        q_sum += tl.load(q_row + index, mask=near, other=0.0).to(tl.float32)
    tl.store(out_ptr + place * vocabulary + x, bounded_ratio(p_sum, q_sum), mask=inside)


def window_ratio_at_triton(p: Tensor, q: Tensor, codebook: Tensor, x: Tensor) -> Tensor:
    """Launch `window_ratio` for some tokens: p, q [..., V], codebook [K, d], x [..., m] -> [..., m]."""
    out = torch.empty(x.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q, x = planes(p), planes(q), x.contiguous()
    taken, _ = select(p, x, RANKS_BELOW, RANKS_ABOVE, lower_index_above=False)
    nodes, tiles, width = taken.shape
    _window_merge_kernel[(nodes,)](
        taken,
        p,
        q,
        codebook.contiguous(),
        x,
        out,
        p.shape[1],
        x.shape[-1],
        *p.stride()[:2],
        *q.stride()[:2],
        tiles,
        *codebook.shape,
        LARGEST_DIFFERENCE,
        LARGEST_SQUARED_DISTANCE,
        BELOW=RANKS_BELOW,
        ABOVE=RANKS_ABOVE,
        WIDTH=width,
        SLOTS=triton.next_power_of_2(tiles * width),
        BLOCK=min(64, triton.next_power_of_2(codebook.shape[1])),
    )
    return out


def window_ratio_triton(p: Tensor, q: Tensor, codebook: Tensor) -> Tensor:
    """Launch `window_ratio` for all tokens: p, q [..., V], codebook [K, d] -> [..., V]."""
    out = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    ordered, order = p.sort(dim=-1, stable=True)
    q, vocabulary = planes(q), p.shape[-1]
    _windows_kernel[(q.shape[0] * q.shape[1], triton.cdiv(vocabulary, RANKS))](
        ordered.contiguous(),
        order.contiguous(),
        q,
        codebook.contiguous(),
        out,
        q.shape[1],
        *q.stride()[:2],
        vocabulary,
        *codebook.shape,
        LARGEST_DIFFERENCE,
        LARGEST_SQUARED_DISTANCE,
        BELOW=RANKS_BELOW,
        ABOVE=RANKS_ABOVE,
        RANKS=RANKS,
        BLOCK=min(16, triton.next_power_of_2(codebook.shape[1])),
    )
    return out
