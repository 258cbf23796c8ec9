"""Tree attention: the nodes of a draft attend to the committed tokens of their rows and to their ancestors.

Keys are in static buffers: those of a row's committed tokens first, then those of the draft, then stale ones.
Instead of a mask over all columns, the op takes lengths, window starts and a mask over the draft.

    out_i = sum_j 2^(s_ij - m_i) v_j / sum_j 2^(s_ij - m_i)
    s_ij = q_i . k_j scale log2(e),    m_i = max_j s_ij

One program of the kernel processes a tile of queries, with all heads of a group that shares keys, and a part
of the columns. Blocks that are visible to every query of the tile need no mask, unlike those at window starts
and behind the committed tokens. Each product of float32 numbers is three tf32 products, exact to about 2^-21.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .backend import INTERPRETED, launcher, operator, rows_together, tl, triton, use_triton

LARGEST_KEY = 512  # bytes per key and head; larger keys spill registers
# two per multiprocessor of a Hopper GPU; constant, so that results are the same on other GPUs
PROGRAMS = 264
SHORTEST_PART, MOST_PARTS = 128, 64


@operator(
    fake=lambda query, *_: torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
)
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, lengths: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Attend from every node to the committed tokens of its row, optionally in a window, and to the draft.

    The kernel processes parts of the columns in parallel and merges them by their normalizers
    (Flash-Decoding, Dao et al. 2023). The number of parts depends on shapes only, not on lengths. Keys of
    more than 512 bytes per head use the torch implementation.

    Args:
        query: [B, heads, n, d]; consecutive heads share a key head.
        key, value: [B, key heads, width, d], any strides.
        first: [B, n or 1] first committed token visible to a node; above 0 in a sliding window.
        lengths: [B] number of committed tokens; slot s of the draft is column `lengths + s`.
        visible: [B, n or 1, m] nonzero where slot s is visible to a node; `lengths + m` is at most the width.
        scale: scale of the logits.

    Returns:
        [B, n, heads, d] in the query's dtype; zeros if nothing is visible to a node.

    Raises:
        ValueError: key heads do not divide query heads, or the shapes of keys and values differ.
    """
    rows, heads, nodes, dim = query.shape
    kv_heads, width = key.shape[1:3]
    if heads % kv_heads or key.shape != value.shape:
        raise ValueError(
            "key and value must have the same shape, with a number of heads that divides that of the query; "
            f"got {heads} query heads, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if (
        query.dtype != torch.float64
        and query.element_size() * dim <= LARGEST_KEY
        and use_triton(query.device)
    ):
        return tree_attention_triton(query, key, value, first, lengths, visible, scale)
    precise = torch.promote_types(query.dtype, torch.float32)
    column = torch.arange(width, device=query.device)
    slot = (column - lengths[:, None])[:, None]  # [B, 1, width]
    extent = visible.shape[2]
    drafted = visible.bool().gather(2, slot.clamp(0, extent - 1).expand(-1, visible.shape[1], -1))
    drafted = drafted & (slot >= 0) & (slot < extent)
    seen = ((slot < 0) & (column >= first[..., None]) | drafted).expand(rows, nodes, width)[:, None, None]
    # stale values may be NaN, and 0 times NaN is NaN
    value = value.masked_fill(~seen.any(3)[:, 0, 0, None, :, None], 0)
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads)).to(precise)  # [B, key heads, group, n, d]
    logits = grouped @ key[:, :, None].to(precise).mT * scale
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0)
    out: Tensor = weights @ value[:, :, None].to(precise)
    return out.to(query.dtype).flatten(1, 2).transpose(1, 2).contiguous()


class Config(NamedTuple):
    """Tile of a program: queries, columns, masked columns, and compile options."""

    queries: int
    columns: int
    edge: int
    warps: int
    stages: int


@launcher
def tree_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, lengths: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Launch `tree_attention`."""
    rows, heads, nodes, dim = query.shape
    key_heads, width = key.shape[1:3]
    query, key, value, visible = map(rows_together, (query, key, value, visible))
    if visible.dtype == torch.bool:
        visible = visible.view(torch.uint8)
    config = configuration(nodes * heads // key_heads, dim, query.dtype)
    tiles = triton.cdiv(nodes * heads // key_heads, config.queries)
    parts = parts_of(tiles * rows * key_heads, width)
    out = torch.empty(rows, nodes, heads, dim, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    block = max(16, triton.next_power_of_2(dim))
    acc, peak, mass = out, None, None
    if parts > 1:
        acc = torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device)
        peak, mass = torch.empty(2, parts, *out.shape[:3], dtype=torch.float32, device=out.device)
    _attend_kernel[tiles, rows * key_heads, parts](
        query, key, value, first, lengths, visible, acc, peak, mass,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        first.stride(0), first.stride(1) if first.shape[1] > 1 else 0,
        lengths.stride(0),
        visible.stride(0), visible.stride(1) if visible.shape[1] > 1 else 0,
        nodes, width, visible.shape[2],
        triton.cdiv(triton.cdiv(width, parts), config.columns) * config.columns,
        scale * math.log2(math.e),
        KEY_HEADS=key_heads, GROUP=heads // key_heads, D=dim, BLOCK_D=block,
        QUERIES=config.queries, COLUMNS=config.columns, EDGE=config.edge,
        SPLIT=parts > 1, UPCAST=INTERPRETED,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if parts > 1:
        lines = rows * nodes * heads
        _merge_kernel[(lines,)](acc, peak, mass, out, lines, D=dim, BLOCK_D=block, PARTS=parts)
    return out


def configuration(queries: int, dim: int, dtype: torch.dtype) -> Config:
    """Tile for a number of queries that share keys of `dim` elements."""
    large = dim > 128
    if dtype == torch.float32:
        return Config(16, 32, 32, 4, 3)
    if queries <= 16:
        return Config(16, 32, 32, 4, 3) if large else Config(16, 64, 32, 4, 3)
    if queries <= 64 or large:
        return Config(64, 32, 16, 8, 3) if large else Config(64, 64, 32, 8, 3)
    return Config(128, 64, 16, 8, 3)


def parts_of(programs: int, width: int) -> int:
    """Number of column parts per program, a power of two."""
    wanted = min(PROGRAMS // programs, width // SHORTEST_PART, MOST_PARTS)
    return 1 << max(wanted, 1).bit_length() - 1


@triton.jit
def _read_block(
    acc,
    peak,
    mass,
    q,
    begin,
    stop,
    k_ptr,
    v_ptr,
    k_column,
    v_column,
    visible_ptr,
    sight,
    inside,
    first,
    length,
    slots,
    scale,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add a block of columns to the running sums of a tile."""
    d = tl.arange(0, BLOCK_D)[None, :]
    column = begin + tl.arange(0, COLUMNS)
    at = column.to(tl.int64)[:, None]
    exists = (column < stop)[:, None] if MASKED else d >= 0
    k = tl.load(k_ptr + at * k_column + d, mask=exists & (d < D), other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    logits = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    if MASKED:
        slot = column - length
        drafted = tl.load(
            visible_ptr + (sight[:, None] + slot[None, :]),
            mask=inside[:, None] & ((slot >= 0) & (slot < slots) & (column < stop))[None, :],
            other=0,
        )
        committed = (slot < 0)[None, :] & (column[None, :] >= first[:, None])
        seen = committed | (drafted != 0)
        logits = tl.where(seen, logits, float("-inf"))
        # stale values may be NaN, and 0 times NaN is NaN
        exists = (tl.max(seen.to(tl.int32), 0) > 0)[:, None]
    v = tl.load(v_ptr + at * v_column + d, mask=exists & (d < D), other=0.0)
    if UPCAST:
        v = v.to(tl.float32)
    top = tl.maximum(peak, tl.max(logits, 1))
    shift = tl.where(top == float("-inf"), 0.0, top)  # no visible column so far
    p = tl.exp2(logits - shift[:, None])
    fade = tl.exp2(peak - shift)
    mass = mass * fade + tl.sum(p, 1)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
    return acc, top, mass


@triton.jit(do_not_specialize=["nodes", "width", "slots"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    length_ptr,
    visible_ptr,
    out_ptr,
    peak_ptr,
    mass_ptr,
    q_row,
    q_head,
    q_node,
    k_row,
    k_head,
    k_column,
    v_row,
    v_head,
    v_column,
    first_row,
    first_node,
    length_row,
    visible_row,
    visible_node,
    nodes,
    width,
    slots,
    part,
    scale,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = (tl.program_id(1) // KEY_HEADS).to(tl.int64)
    key_head = tl.program_id(1) % KEY_HEADS
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = query < nodes * GROUP
    node, head = query // GROUP, key_head * GROUP + query % GROUP
    d = tl.arange(0, BLOCK_D)[None, :]
    held = inside[:, None] & (d < D)
    q = tl.load(
        q_ptr + row * q_row + head[:, None] * q_head + node[:, None] * q_node + d, mask=held, other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
    length = tl.load(length_ptr + row * length_row).to(tl.int32)
    first = tl.load(first_ptr + row * first_row + node * first_node, mask=inside, other=0).to(tl.int32)
    # starts of the tile's widest and narrowest window; windows may start behind all committed tokens
    lowest = tl.minimum(tl.min(tl.where(inside, first, width)), length)
    highest = tl.minimum(tl.max(first), length)

    start = tl.program_id(2) * part
    stop = tl.minimum(tl.minimum(start + part, length + slots), width)
    start = tl.maximum(start, lowest // COLUMNS * COLUMNS)
    whole = tl.maximum(start, tl.minimum(stop, length) // COLUMNS * COLUMNS)
    clear = tl.minimum(whole, tl.maximum(start, tl.cdiv(highest, COLUMNS) * COLUMNS))

    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    k_ptr += row * k_row + key_head * k_head
    v_ptr += row * v_row + key_head * v_head
    visible_ptr += row * visible_row
    sight = node * visible_node
    for begin in tl.range(clear, whole, COLUMNS):
        acc, peak, mass = _read_block(
            acc, peak, mass, q, begin, stop, k_ptr, v_ptr, k_column, v_column, visible_ptr, sight, inside,
            first, length, slots, scale,
            MASKED=False, D=D, BLOCK_D=BLOCK_D, COLUMNS=COLUMNS, UPCAST=UPCAST,
        )  # fmt: skip
    before = clear - start  # columns of blocks at window starts; the other masked ones are behind `whole`
    for done in tl.range(0, before + tl.maximum(stop - whole, 0), EDGE, num_stages=1):
        begin = tl.where(done < before, start + done, whole + done - before)
        acc, peak, mass = _read_block(
            acc, peak, mass, q, begin, stop, k_ptr, v_ptr, k_column, v_column, visible_ptr, sight, inside,
            first, length, slots, scale,
            MASKED=True, D=D, BLOCK_D=BLOCK_D, COLUMNS=EDGE, UPCAST=UPCAST,
        )  # fmt: skip

    rows = tl.num_programs(1) // KEY_HEADS
    line = ((tl.program_id(2) * rows + row) * nodes + node) * (KEY_HEADS * GROUP) + head
    out = out_ptr + line[:, None] * D + d
    if SPLIT:
        tl.store(out, acc, mask=held & (peak > float("-inf"))[:, None])
        tl.store(peak_ptr + line, peak, mask=inside)
        tl.store(mass_ptr + line, mass, mask=inside)
    else:
        acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _merge_kernel(
    acc_ptr, peak_ptr, mass_ptr, out_ptr, lines, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PARTS).to(tl.int64) * lines + line
    d = tl.arange(0, BLOCK_D)[None, :]
    peak, mass = tl.load(peak_ptr + at), tl.load(mass_ptr + at)
    filled = peak > float("-inf")  # a part without visible columns did not write its sums
    top = tl.max(peak)
    weight = tl.where(filled, tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    acc = tl.load(acc_ptr + at[:, None] * D + d, mask=filled[:, None] & (d < D), other=0.0)
    total = tl.sum(weight * mass)
    out = tl.sum(weight[:, None] * acc, 0)[None, :] / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + line * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
