"""Acceptance ratios min(1, P(C) / Q(C)) of groups of tokens with similar probability (GSD).

A token's group in GSD (2508.07747) is its rank by probability, divided by the group's size.

For selected tokens the kernels find the neighbouring ranks without a sort. Tokens are ordered by a unique
64-bit key: the bits of the probability, which are monotonic for non-negative numbers, followed by an index.
Each tile of the vocabulary yields its candidates, which a second kernel merges.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backend import launcher, operator, planes, tl, triton, use_triton
from .ordering import sort_stably

MEMBERS = 1024  # tokens of groups per program
TILE = 4096  # tokens that one program searches for neighbouring ranks
LARGEST_SELECTION = 32  # largest group size for which selecting beats sorting
NONE_BELOW = tl.constexpr(-1)
NONE_ABOVE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@operator(fake=lambda p, q, size: p.new_empty(p.shape))
def rank_ratio(p: Tensor, q: Tensor, size: int) -> Tensor:
    """Acceptance ratio of each token's group; groups are ranks in p, largest first, divided by `size`.

    Ties in p rank the lower index first. Tokens with p = 0 are in no group: their ratio is zero, and q's mass
    on them is not counted.

    Args:
        p, q: [..., V] distributions of target and draft.
        size: tokens per group; the last group may have fewer.

    Returns:
        [..., V] the ratio of each token's group.
    """
    if p.dtype != torch.float64 and use_triton(p.device):
        return rank_ratio_triton(p, q, size)
    return _rank_ratio(p, q, size)


@operator(fake=lambda p, q, x, size: p.new_empty(x.shape))
def rank_ratio_at(p: Tensor, q: Tensor, x: Tensor, size: int) -> Tensor:
    """`rank_ratio` of the tokens x [..., m] only, [..., m]; the kernel does not sort."""
    if p.dtype != torch.float64 and use_triton(p.device):
        return rank_ratio_at_triton(p, q, x, size)
    return _rank_ratio(p, q, size).gather(-1, x)


def _rank_ratio(p: Tensor, q: Tensor, size: int) -> Tensor:
    """`rank_ratio` in torch."""
    ordered, order = sort_stably(p, descending=True)
    allowed = q.gather(-1, order).where(ordered > 0, 0.0)
    surplus = -p.shape[-1] % size
    sums = [pad(mass, (0, surplus)).unflatten(-1, (-1, size)).sum(-1) for mass in (ordered, allowed)]
    ratio = bounded_ratio(*sums).repeat_interleave(size, -1)[..., : p.shape[-1]]
    return torch.zeros_like(p).scatter(-1, order, ratio.where(ordered > 0, 0.0))


def bounded_ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q); 1 where q is zero, because q never draws there."""
    return torch.where(q > p, p / q.clamp_min(torch.finfo(p.dtype).tiny), 1.0)


@launcher
def rank_ratio_triton(p: Tensor, q: Tensor, size: int) -> Tensor:
    """Launch `rank_ratio`: p, q [..., V] -> [..., V]."""
    out = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    vocabulary = p.shape[-1]
    order = p.sort(dim=-1, descending=True, stable=True).indices.contiguous()
    p, q, groups = planes(p), planes(q), triton.cdiv(vocabulary, size)
    width = min(MEMBERS, triton.next_power_of_2(size))
    held = min(MEMBERS // width, triton.next_power_of_2(groups))
    _groups_kernel[(p.shape[0] * p.shape[1], triton.cdiv(groups, held))](
        p,
        q,
        order,
        out,
        p.shape[1],
        *p.stride()[:2],
        *q.stride()[:2],
        vocabulary,
        size,
        GROUPS=held,
        WIDTH=width,
    )
    return out


@launcher
def rank_ratio_at_triton(p: Tensor, q: Tensor, x: Tensor, size: int) -> Tensor:
    """Launch `rank_ratio_at`: p, q [..., V], x [..., m] -> [..., m]."""
    if size > LARGEST_SELECTION:
        return rank_ratio_triton(p, q, size).gather(-1, x)
    out = torch.empty(x.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q, x = planes(p), planes(q), x.contiguous()
    nodes, tile = x.numel(), min(TILE, triton.next_power_of_2(p.shape[-1]))
    tiles, width = triton.cdiv(p.shape[-1], tile), triton.next_power_of_2(max(1, 2 * size - 2))
    taken = torch.empty(nodes, tiles, width, dtype=torch.int64, device=p.device)
    before = torch.empty(nodes, tiles, dtype=torch.int32, device=p.device)
    _select_kernel[(nodes, tiles)](
        p,
        x,
        taken,
        before,
        p.shape[1],
        x.shape[-1],
        *p.stride()[:2],
        p.shape[-1],
        SIZE=size,
        WIDTH=width,
        TILE=tile,
        num_warps=8,
    )
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


@triton.jit
def _key(value, place):
    """Sortable integer of a probability; -0 counts as 0."""
    bits = tl.where(value > 0, value, 0.0).to(tl.int32, bitcast=True)
    return (bits.to(tl.int64) << 32) | place


@triton.jit
def _key_value(key):
    """Probability of a key."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _bounded_ratio(p, q):
    """min(1, p / q); 1 where q is zero, because q never draws there."""
    return tl.where(q > p, p / tl.maximum(q, TINY), 1.0)


@triton.jit
def _take_neighbours(below, above, lane, SIZE: tl.constexpr):
    """Neighbours of a key: the SIZE - 1 largest of `below`, descending, then the smallest of `above`."""
    taken = tl.full(lane.shape, NONE_BELOW, tl.int64)
    for step in range(SIZE - 1):
        best = tl.max(below, 0)
        taken = tl.where(lane == step, best, taken)
        below = tl.where(below == best, NONE_BELOW, below)
    for step in range(SIZE - 1):
        best = tl.min(above, 0)
        found = tl.where(best == NONE_ABOVE, NONE_BELOW, best)
        taken = tl.where(lane == SIZE - 1 + step, found, taken)
        above = tl.where(above == best, NONE_ABOVE, above)
    return taken


@triton.jit
def _select_kernel(
    p_ptr,  # [batch, positions, vocabulary] with two strides
    x_ptr,  # [batch * places * tokens]
    taken_ptr,  # [nodes, tiles, WIDTH] keys
    before_ptr,  # [nodes, tiles] number of keys of the tile above the key of x
    places,
    tokens,
    batch_stride,
    place_stride,
    vocabulary,
    SIZE: tl.constexpr,
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
    index, x = vocabulary - 1 - index, vocabulary - 1 - x  # ties rank the lower token higher
    own, key = _key(p_x, x), _key(p, index)
    is_above = inside & (key > own)
    lane = tl.arange(0, WIDTH)
    taken = _take_neighbours(
        tl.where(inside & (key < own), key, NONE_BELOW),
        tl.where(is_above, key, NONE_ABOVE),
        lane,
        SIZE,
    )
    tile = node * tl.num_programs(1) + tl.program_id(1)
    tl.store(taken_ptr + tile * WIDTH + lane, taken)
    tl.store(before_ptr + tile, tl.sum(is_above.to(tl.int32), 0))


@triton.jit
def _merge_selected(taken_ptr, node, tiles, SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    """Neighbours of the key of x in the whole row, [WIDTH], merged from all tiles."""
    slot = tl.arange(0, SLOTS)
    key = tl.load(taken_ptr + node * tiles * WIDTH + slot, mask=slot < tiles * WIDTH, other=NONE_BELOW)
    lane = slot % WIDTH
    below = tl.where(lane < SIZE - 1, key, NONE_BELOW)
    above = tl.where((lane >= SIZE - 1) & (key >= 0), key, NONE_ABOVE)
    return _take_neighbours(below, above, tl.arange(0, WIDTH), SIZE)


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
    above = tl.sum(before, 0) % SIZE  # number of the group's tokens that rank before x
    taken = _merge_selected(taken_ptr, node, tiles, SIZE, WIDTH, SLOTS)
    lane = tl.arange(0, WIDTH)
    is_below = lane < SIZE - 1
    member = (is_below & (lane < SIZE - 1 - above)) | (~is_below & (lane - (SIZE - 1) < above))
    p = _key_value(taken)
    member = member & (taken >= 0) & (p > 0)  # tokens with p = 0 are in no group
    index = vocabulary - 1 - (taken & 0xFFFFFFFF)
    q_row = q_ptr + batch * q_batch_stride + place * q_place_stride
    q = tl.load(q_row + index, mask=member, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + node)
    p_x = tl.load(p_ptr + batch * p_batch_stride + place * p_place_stride + x).to(tl.float32)
    q_x = tl.load(q_row + x).to(tl.float32)
    ratio = _bounded_ratio(p_x + tl.sum(tl.where(member, p, 0.0), 0), q_x + tl.sum(q, 0))
    tl.store(out_ptr + node, tl.where(p_x > 0, ratio, 0.0))


@triton.jit
def _groups_kernel(
    p_ptr,  # [batch, positions, vocabulary] with two strides
    q_ptr,  # [batch, positions, vocabulary] with two strides
    order_ptr,  # [batch * places, vocabulary] tokens by rank
    out_ptr,  # as order
    places,
    p_batch_stride,
    p_place_stride,
    q_batch_stride,
    q_place_stride,
    vocabulary,
    size,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_ptr + row // places * p_batch_stride + row % places * p_place_stride
    q_row = q_ptr + row // places * q_batch_stride + row % places * q_place_stride
    order_ptr += row * vocabulary
    begin = tl.minimum((tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)) * size, vocabulary)
    end = tl.minimum(begin + size, vocabulary)
    longest = tl.max(end - begin, 0)
    p_sum = tl.zeros([GROUPS, WIDTH], dtype=tl.float32)
    q_sum = tl.zeros([GROUPS, WIDTH], dtype=tl.float32)
    for start in range(0, longest, WIDTH):
        rank = begin[:, None] + start + tl.arange(0, WIDTH)[None, :]
        inside = rank < end[:, None]
        token = tl.load(order_ptr + rank, mask=inside, other=0)
        p = tl.load(p_row + token, mask=inside, other=0.0).to(tl.float32)
        p_sum += p
        q_sum += tl.load(q_row + token, mask=inside & (p > 0), other=0.0).to(tl.float32)
    ratio = _bounded_ratio(tl.sum(p_sum, 1), tl.sum(q_sum, 1))
    for start in range(0, longest, WIDTH):
        rank = begin[:, None] + start + tl.arange(0, WIDTH)[None, :]
        inside = rank < end[:, None]
        token = tl.load(order_ptr + rank, mask=inside, other=0)
        p = tl.load(p_row + token, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * vocabulary + token, tl.where(p > 0, ratio[:, None], 0.0), mask=inside)
