"""Triton kernels that find the tokens next to one in the order of their probability, without a sort.

The order is that of a 64-bit key: the bits of a probability, which rise with it as it is not negative, and
below them an index, so that no two keys are equal. Each tile of the vocabulary gives its candidates, which
the kernels of `groups_triton.py` and `windows_triton.py` merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # tokens that one program looks among

NONE_BELOW = tl.constexpr(-1)
NONE_ABOVE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of float32


@triton.jit
def _key(value, place):
    """Order of a probability; a negative zero is a zero."""
    bits = tl.where(value > 0, value, 0.0).to(tl.int32, bitcast=True)
    return (bits.to(tl.int64) << 32) | place


@triton.jit
def key_value(key):
    """Probability that a key was made of."""
    return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def bounded_ratio(p, q):
    """min(1, p / q); 1 where q is zero, as nothing is drawn there."""
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
def merge_selected(
    taken_ptr, node, tiles, BELOW: tl.constexpr, ABOVE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr
):
    """Keys next to that of x in the whole row, [WIDTH], from those of all tiles."""
    slot = tl.arange(0, SLOTS)
    key = tl.load(taken_ptr + node * tiles * WIDTH + slot, mask=slot < tiles * WIDTH, other=NONE_BELOW)
    lane = slot % WIDTH
    below = tl.where(lane < BELOW, key, NONE_BELOW)
    above = tl.where((lane >= BELOW) & (key >= 0), key, NONE_ABOVE)
    return _take_neighbours(below, above, tl.arange(0, WIDTH), BELOW, ABOVE)


def select(p: Tensor, x: Tensor, below: int, above: int, lower_index_above: bool) -> tuple[Tensor, Tensor]:
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
