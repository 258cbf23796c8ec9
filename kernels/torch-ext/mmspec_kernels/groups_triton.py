"""Triton kernels of `groups.py` and their launchers.

The order of tokens is that of a 64-bit key: the bits of a probability, which rise with it as it is not
negative, and below them an index, so that no two keys are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .groups import LARGEST_DIFFERENCE, LARGEST_SQUARED_DISTANCE, RANKS_ABOVE, RANKS_BELOW
from .layout import planes

TILE = 4096  # tokens that one program looks for neighbours in rank among
MEMBERS = 1024  # tokens of groups that one program holds at once
LARGEST_SELECTION = 32  # tokens of a group, up to which selecting beats sorting
RANKS = 128  # tokens whose windows one program sums up

NONE_BELOW = tl.constexpr(-1)
NONE_ABOVE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def _key(value, place):
    """Order of a probability; a negative zero is a zero."""
    bits = tl.where(value > 0, value, 0.0).to(tl.int32, bitcast=True)
    return (bits.to(tl.int64) << 32) | place


@triton.jit
def _value(key):
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _bounded_ratio(p, q):
    return tl.where(q > p, p / tl.maximum(q, TINY), 1.0)


@triton.jit
def _take_neighbours(below, above, lane, BELOW: tl.constexpr, ABOVE: tl.constexpr):
    """Keys next to one: the BELOW largest of `below`, falling, then the ABOVE smallest of `above`, rising."""
    taken = tl.full(lane.shape, NONE_BELOW, tl.int64)
    for step in range(BELOW):
        best = tl.max(below, 0)
        taken = tl.where(lane == step, best, taken)
        below = tl.where(below == best, NONE_BELOW, below)
    for step in range(ABOVE):
        best = tl.min(above, 0)
        found = tl.where(best == NONE_ABOVE, NONE_BELOW, best)
        taken = tl.where(lane == BELOW + step, found, taken)
        above = tl.where(above == best, NONE_ABOVE, above)
    return taken


@triton.jit
def _select_kernel(
    p_ptr,  # [batch, places, vocabulary] with two strides
    x_ptr,  # [batch * places * tokens]
    taken_ptr,  # [nodes, tiles, WIDTH] keys
    before_ptr,  # [nodes, tiles] how many keys of the tile are above that of x
    places,
    tokens,
    batch_stride,
    place_stride,
    vocabulary,
    LOWER_INDEX_ABOVE: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    place = node // tokens
    row_ptr = p_ptr + place // places * batch_stride + place % places * place_stride
    index = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = index < vocabulary
    x = tl.load(x_ptr + node)
    p_x = tl.load(row_ptr + x).to(tl.float32)
    p = tl.load(row_ptr + index, mask=inside, other=0.0).to(tl.float32)
    if LOWER_INDEX_ABOVE:
        index, x = vocabulary - 1 - index, vocabulary - 1 - x
    own, key = _key(p_x, x), _key(p, index)
    is_above = inside & (key > own)
    lane = tl.arange(0, WIDTH)
    taken = _take_neighbours(
        tl.where(inside & (key < own), key, NONE_BELOW),
        tl.where(is_above, key, NONE_ABOVE),
        lane,
        BELOW,
        ABOVE,
    )
    tile = node * tl.num_programs(1) + tl.program_id(1)
    tl.store(taken_ptr + tile * WIDTH + lane, taken)
    tl.store(before_ptr + tile, tl.sum(is_above.to(tl.int32), 0))


@triton.jit
def _merge(
    taken_ptr, node, tiles, BELOW: tl.constexpr, ABOVE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr
):
    """Keys next to that of x in the whole row, [WIDTH], from those of all tiles."""
    slot = tl.arange(0, SLOTS)
    key = tl.load(taken_ptr + node * tiles * WIDTH + slot, mask=slot < tiles * WIDTH, other=NONE_BELOW)
    lane = slot % WIDTH
    below = tl.where(lane < BELOW, key, NONE_BELOW)
    above = tl.where((lane >= BELOW) & (key >= 0), key, NONE_ABOVE)
    return _take_neighbours(below, above, tl.arange(0, WIDTH), BELOW, ABOVE)


@triton.jit
def _rank_merge_kernel(
    taken_ptr,
    before_ptr,
    p_ptr,
    q_ptr,
    x_ptr,
    out_ptr,  # as x
    places,
    tokens,
    p_batch_stride,
    p_place_stride,
    q_batch_stride,
    q_place_stride,
    vocabulary,
    tiles,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    place = node // tokens
    batch, place = place // places, place % places
    tile = tl.arange(0, TILES)
    before = tl.load(before_ptr + node * tiles + tile, mask=tile < tiles, other=0)
    above = tl.sum(before, 0) % SIZE  # of the group's tokens, those that come before x
    taken = _merge(taken_ptr, node, tiles, SIZE - 1, SIZE - 1, WIDTH, SLOTS)
    lane = tl.arange(0, WIDTH)
    is_below = lane < SIZE - 1
    member = (is_below & (lane < SIZE - 1 - above)) | (~is_below & (lane - (SIZE - 1) < above))
    p = _value(taken)
    member = member & (taken >= 0) & (p > 0)  # tokens that p excludes are in no group
    index = vocabulary - 1 - (taken & 0xFFFFFFFF)
    q_row = q_ptr + batch * q_batch_stride + place * q_place_stride
    q = tl.load(q_row + index, mask=member, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + node)
    p_x = tl.load(p_ptr + batch * p_batch_stride + place * p_place_stride + x).to(tl.float32)
    q_x = tl.load(q_row + x).to(tl.float32)
    ratio = _bounded_ratio(p_x + tl.sum(tl.where(member, p, 0.0), 0), q_x + tl.sum(q, 0))
    tl.store(out_ptr + node, tl.where(p_x > 0, ratio, 0.0))


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
    taken = _merge(taken_ptr, node, tiles, BELOW, ABOVE, WIDTH, SLOTS)
    lane = tl.arange(0, WIDTH)
    exists = taken >= 0
    windowed = tl.sum((exists & (lane < BELOW)).to(tl.int32), 0) == BELOW  # else the exact rule
    x = tl.load(x_ptr + node)
    p_x = tl.load(p_ptr + batch * p_batch_stride + place * p_place_stride + x).to(tl.float32)
    q_row = q_ptr + batch * q_batch_stride + place * q_place_stride
    p, index = _value(taken), taken & 0xFFFFFFFF
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
        step = own.to(tl.float32)[None, :] - other.to(tl.float32)
        gap += tl.sum(step * step, 1)
    near = near & (gap < distance)
    q = tl.load(q_row + index, mask=near, other=0.0).to(tl.float32)
    q_x = tl.load(q_row + x).to(tl.float32)
    ratio = _bounded_ratio(p_x + tl.sum(tl.where(near, p, 0.0), 0), q_x + tl.sum(q, 0))
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
            difference_of = own.to(tl.float32) - other.to(tl.float32)
            gap += tl.sum(difference_of * difference_of, 1)
        near = near & (gap < distance)
        p_sum += tl.where(near, p, 0.0)
        q_sum += tl.load(q_row + index, mask=near, other=0.0).to(tl.float32)
    tl.store(out_ptr + place * vocabulary + x, _bounded_ratio(p_sum, q_sum), mask=inside)


@triton.jit
def _groups_kernel(
    p_ptr,  # [batch, places, vocabulary] with two strides
    q_ptr,  # [batch, places, vocabulary] with two strides
    members_ptr,  # tokens by group: [listed], or [batch * places, listed]
    starts_ptr,  # [groups + 1] where each group begins, or None: every `size` tokens
    out_ptr,  # [batch * places, vocabulary]
    places,
    p_batch_stride,
    p_place_stride,
    q_batch_stride,
    q_place_stride,
    vocabulary,
    members_stride,
    listed,
    groups,
    size,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_ptr + row // places * p_batch_stride + row % places * p_place_stride
    q_row = q_ptr + row // places * q_batch_stride + row % places * q_place_stride
    members_ptr += row * members_stride
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    if starts_ptr is None:
        begin = tl.minimum(group * size, listed)
        end = tl.minimum(begin + size, listed)
    else:
        begin = tl.load(starts_ptr + group, mask=group < groups, other=0).to(tl.int32)
        end = tl.load(starts_ptr + group + 1, mask=group < groups, other=0).to(tl.int32)
    # a token that is not listed is a group of its own
    single = listed + group - groups
    begin = tl.where(group < groups, begin, tl.minimum(single, vocabulary))
    end = tl.where(group < groups, end, tl.minimum(single + 1, vocabulary))
    longest = tl.max(end - begin, 0)
    p_sum = tl.zeros([GROUPS], dtype=tl.float32)
    q_sum = tl.zeros([GROUPS], dtype=tl.float32)
    for start in range(0, longest, WIDTH):
        place = begin[:, None] + start + tl.arange(0, WIDTH)[None, :]
        inside = place < end[:, None]
        token = tl.load(members_ptr + place, mask=inside & (place < listed), other=0)
        token = tl.where(place < listed, token, place)
        p = tl.load(p_row + token, mask=inside, other=0.0).to(tl.float32)
        q = tl.load(q_row + token, mask=inside & (p > 0), other=0.0).to(tl.float32)
        p_sum += tl.sum(p, 1)
        q_sum += tl.sum(q, 1)
    ratio = _bounded_ratio(p_sum, q_sum)
    for start in range(0, longest, WIDTH):
        place = begin[:, None] + start + tl.arange(0, WIDTH)[None, :]
        inside = place < end[:, None]
        token = tl.load(members_ptr + place, mask=inside & (place < listed), other=0)
        token = tl.where(place < listed, token, place)
        p = tl.load(p_row + token, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * vocabulary + token, tl.where(p > 0, ratio[:, None], 0.0), mask=inside)


def rank_ratio_triton(p: Tensor, q: Tensor, size: int) -> Tensor:
    """Launch `rank_ratio`: p, q [..., V] -> [..., V]."""
    order = p.sort(dim=-1, descending=True, stable=True).indices
    groups = triton.cdiv(p.shape[-1], size)
    return _launch_groups(p, q, order.view(-1, p.shape[-1]), None, groups, size)


def cluster_ratio_triton(p: Tensor, q: Tensor, members: Tensor, starts: Tensor) -> Tensor:
    """Launch `cluster_ratio`: p, q [..., V], members [K], starts [clusters + 1] -> [..., V]."""
    groups = len(starts) - 1
    return _launch_groups(p, q, members, starts, groups, triton.cdiv(len(members), groups))


def _launch_groups(
    p: Tensor, q: Tensor, members: Tensor, starts: Tensor | None, groups: int, size: int
) -> Tensor:
    out = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q = planes(p), planes(q)
    listed, vocabulary = members.shape[-1], p.shape[-1]
    width = min(MEMBERS, triton.next_power_of_2(size))
    held = min(MEMBERS // width, triton.next_power_of_2(groups))
    grid = (p.shape[0] * p.shape[1], triton.cdiv(groups + vocabulary - listed, held))
    _groups_kernel[grid](
        p,
        q,
        members,
        starts,
        out,
        p.shape[1],
        *p.stride()[:2],
        *q.stride()[:2],
        vocabulary,
        0 if starts is not None else listed,
        listed,
        groups,
        size,
        GROUPS=held,
        WIDTH=width,
    )
    return out


def rank_ratio_at_triton(p: Tensor, q: Tensor, x: Tensor, size: int) -> Tensor:
    """Launch `rank_ratio_at`: p, q [..., V], x [..., m] -> [..., m]."""
    if size > LARGEST_SELECTION:
        return rank_ratio_triton(p, q, size).gather(-1, x)
    out = torch.empty(x.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q, x = planes(p), planes(q), x.contiguous()
    taken, before = _select(p, x, size - 1, size - 1, lower_index_above=True)
    nodes, tiles, width = taken.shape
    _rank_merge_kernel[(nodes,)](
        taken,
        before,
        p,
        q,
        x,
        out,
        p.shape[1],
        x.shape[-1],
        *p.stride()[:2],
        *q.stride()[:2],
        p.shape[-1],
        tiles,
        SIZE=size,
        WIDTH=width,
        TILES=triton.next_power_of_2(tiles),
        SLOTS=triton.next_power_of_2(tiles * width),
    )
    return out


def window_ratio_at_triton(p: Tensor, q: Tensor, codebook: Tensor, x: Tensor) -> Tensor:
    """Launch `window_ratio` for some tokens: p, q [..., V], codebook [K, d], x [..., m] -> [..., m]."""
    out = torch.empty(x.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q, x = planes(p), planes(q), x.contiguous()
    taken, _ = _select(p, x, RANKS_BELOW, RANKS_ABOVE, lower_index_above=False)
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


def _select(p: Tensor, x: Tensor, below: int, above: int, lower_index_above: bool) -> tuple[Tensor, Tensor]:
    """Launch the selection: p [batch, places, V], x [..., m], nodes in all.

    Returns:
        taken: [nodes, tiles, width] int64, the keys next to that of each x in each tile.
        before: [nodes, tiles] int32, how many keys of the tile are above it.
    """
    tile = min(TILE, triton.next_power_of_2(p.shape[-1]))
    tiles, width = triton.cdiv(p.shape[-1], tile), triton.next_power_of_2(max(1, below + above))
    taken = torch.empty(x.numel(), tiles, width, dtype=torch.int64, device=p.device)
    before = torch.empty(x.numel(), tiles, dtype=torch.int32, device=p.device)
    _select_kernel[(x.numel(), tiles)](
        p,
        x,
        taken,
        before,
        p.shape[1],
        x.shape[-1],
        *p.stride()[:2],
        p.shape[-1],
        LOWER_INDEX_ABOVE=lower_index_above,
        BELOW=below,
        ABOVE=above,
        WIDTH=width,
        TILE=tile,
        num_warps=8,
    )
    return taken, before
