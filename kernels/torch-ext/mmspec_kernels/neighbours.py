"""Aggregated probability of the nearest neighbours of a token, within a limit (LANTERN, 2410.03355).

Neighbours are added, nearest first, as long as their total mass stays within the limit. The sum stops at the
first neighbour that does not fit (m* = 0: none).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from .backend import launcher, operator, planes, tl, triton, use_triton

CACHED_ELEMENTS = 2**20  # elements gathered at once, which fit into a processor's cache
UNROLL = 4  # neighbours whose loads overlap
TILE = 1024  # tokens x positions per program
MAX_BLOCK = 1024  # neighbours of a token per scan


@operator(fake=lambda p, table, limit=None: p.new_empty(p.shape))
def nearby_mass(p: Tensor, table: Tensor, limit: Tensor | None = None) -> Tensor:
    """Mass of the nearest neighbours of every token: c(x) of LANTERN.

    Args:
        p: [..., V] a distribution over the K codes and then the syntax tokens, which have no neighbours.
        table: [K, k] neighbours, nearest first; of any integer dtype.
        limit: [..., 1] or [..., V] maximum mass; None adds all k neighbours.

    Returns:
        [..., V], zero for syntax tokens.
    """
    size, count = table.shape
    if p.dtype != torch.float64 and use_triton(p.device):
        return nearby_mass_triton(p, table, limit)
    # positions last, so that the masses of a neighbour are adjacent
    codes = p[..., :size].reshape(-1, size).T.contiguous()
    if count == 0 or limit is None:
        mass = embedding_bag(table.long(), codes, mode="sum") if count else torch.zeros_like(codes)
    else:
        limit = limit.expand(*p.shape[:-1], -1)[..., :size]
        mass = _prefix_mass(codes, table, limit.reshape(-1, limit.shape[-1]).T)
    return pad(mass.T.reshape(*p.shape[:-1], size).contiguous(), (0, p.shape[-1] - size))


@operator(fake=lambda p, table, x, limit=None: (p.new_empty(x.shape), torch.empty_like(x)))
def nearby_prefix(p: Tensor, table: Tensor, x: Tensor, limit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mass of the nearest neighbours of some tokens, and the number of neighbours added.

    Args:
        p, table: see `nearby_mass`.
        x: [..., m] int64 tokens.
        limit: [..., 1] or [..., m] maximum mass; None adds all k neighbours.

    Returns:
        mass: [..., m] `nearby_mass` at x, up to rounding.
        count: [..., m] int64, number m* of neighbours added; 0 for syntax tokens.
    """
    if p.dtype != torch.float64 and use_triton(p.device):
        return nearby_prefix_triton(p, table, x, limit)
    size, count = table.shape
    ids = table[x.clamp_max(size - 1)].long()
    near = p.gather(-1, ids.flatten(-2)).view(ids.shape)
    added = (x < size)[..., None]
    added = added.expand(ids.shape) if limit is None else added & (near.cumsum(-1) <= limit[..., None])
    return near.where(added, 0.0).sum(-1), added.sum(-1)


def _prefix_mass(codes: Tensor, table: Tensor, limit: Tensor) -> Tensor:
    """[K, M] mass of the longest prefix of each code's neighbours that stays within the limit.

    Args:
        codes: [K, M] masses of the codes at M positions.
        table: [K, k].
        limit: [1 or K, M].
    """
    running, kept = torch.zeros_like(codes), torch.zeros_like(codes)
    columns = max(1, CACHED_ELEMENTS // max(1, codes.numel()))
    for block in table.T.split(columns):
        near = codes.index_select(0, block.long().reshape(-1)).view(len(block), *codes.shape)
        prefixes = near.cumsum(0).add_(running)
        kept = torch.maximum(kept, prefixes.where(prefixes <= limit, 0.0).amax(0))
        running = prefixes[-1]
    return kept


@launcher
def nearby_mass_triton(p: Tensor, table: Tensor, limit: Tensor | None) -> Tensor:
    """Launch `nearby_mass`: p [..., V], table [K, k], limit [..., 1 or V] -> [..., V]."""
    out = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    size, neighbours = table.shape
    places, vocabulary = out.numel() // p.shape[-1], p.shape[-1]
    codes = p[..., :size].movedim(-1, 0).reshape(size, places).contiguous()
    strides = (0, 0)
    if limit is not None:
        limit = limit.expand(*p.shape[:-1], -1).reshape(places, -1)
        strides = (limit.stride(0), limit.stride(1) if limit.shape[1] > 1 else 0)
    block_places = min(32, triton.next_power_of_2(places))
    block_tokens = min(128, TILE // block_places)
    grid = (triton.cdiv(vocabulary, block_tokens), triton.cdiv(places, block_places))
    _every_token_kernel[grid](
        codes,
        table,
        limit,
        out,
        places,
        vocabulary,
        size,
        neighbours,
        table.stride(0),
        *strides,
        BLOCK_TOKENS=block_tokens,
        BLOCK_PLACES=block_places,
        UNROLL=UNROLL,
    )
    return out


@launcher
def nearby_prefix_triton(p: Tensor, table: Tensor, x: Tensor, limit: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launch `nearby_prefix`: p [..., V], table [K, k], x [..., m] -> mass and count [..., m]."""
    mass = torch.empty(x.shape, dtype=p.dtype, device=p.device)
    count = torch.empty(x.shape, dtype=torch.int64, device=p.device)
    if not mass.numel():
        return mass, count
    p = planes(p)
    size, neighbours = table.shape
    _prefix_kernel[(x.numel(),)](
        p,
        table,
        x.contiguous(),
        None if limit is None else limit.expand_as(x).contiguous(),
        mass,
        count,
        p.shape[1],
        x.shape[-1],
        *p.stride()[:2],
        size,
        neighbours,
        table.stride(0),
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(max(1, neighbours))),
    )
    return mass, count


@triton.jit
def _every_token_kernel(
    codes_ptr,  # [size, positions]: the masses of a neighbour are adjacent
    table_ptr,  # [size, neighbours] with a stride
    limit_ptr,  # [positions, 1 or vocabulary], or None
    out_ptr,  # [positions, vocabulary]
    places,
    vocabulary,
    size,
    neighbours,
    table_stride,
    limit_place_stride,
    limit_token_stride,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    place = tl.program_id(1).to(tl.int64) * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    end = tl.where(token < size, neighbours, 0)
    known_place = (place < places)[None, :]
    if limit_ptr is not None:
        offset = place[None, :] * limit_place_stride + token[:, None] * limit_token_stride
        limit = tl.load(limit_ptr + offset, mask=(token < size)[:, None] & known_place, other=0.0)
        limit = limit.to(tl.float32)
    running = tl.zeros([BLOCK_TOKENS, BLOCK_PLACES], dtype=tl.float32)
    kept = running
    for start in range(0, neighbours, UNROLL):
        for step in tl.static_range(UNROLL):
            column = start + step
            known = column < end
            ids = tl.load(table_ptr + token * table_stride + column, mask=known, other=0).to(tl.int64)
            source = codes_ptr + ids[:, None] * places + place[None, :]
            running += tl.load(source, mask=known[:, None] & known_place, other=0.0).to(tl.float32)
            if limit_ptr is not None:
                # sums in order are monotonic, so that those within the limit form a prefix
                kept = tl.where(running <= limit, running, kept)
    if limit_ptr is None:
        kept = running
    stored = (token < vocabulary)[:, None] & known_place
    tl.store(out_ptr + place[None, :] * vocabulary + token[:, None], kept, mask=stored)


@triton.jit
def _prefix_kernel(
    p_ptr,  # [batch, positions, vocabulary] with two strides
    table_ptr,  # [size, neighbours] with a stride
    x_ptr,  # [batch * places * tokens]
    limit_ptr,  # as x, or None
    mass_ptr,  # as x
    count_ptr,  # as x
    places,
    tokens,
    batch_stride,
    place_stride,
    size,
    neighbours,
    table_stride,
    BLOCK: tl.constexpr,
):
    node = tl.program_id(0)
    place = (node // tokens).to(tl.int64)
    row_ptr = p_ptr + place // places * batch_stride + place % places * place_stride
    x = tl.load(x_ptr + node)
    near_ptr = table_ptr + x * table_stride
    last = tl.where(x < size, neighbours, 0)
    end = last  # index of the first neighbour that does not fit
    running = 0.0
    mass = 0.0
    for start in range(0, neighbours, BLOCK):
        column = start + tl.arange(0, BLOCK)
        known = column < last
        ids = tl.load(near_ptr + column, mask=known, other=0).to(tl.int64)
        near = tl.load(row_ptr + ids, mask=known, other=0.0).to(tl.float32)
        prefix = running + tl.cumsum(near, 0)
        if limit_ptr is not None:
            limit = tl.load(limit_ptr + node).to(tl.float32)
            # a scan rounds in another order and may not be monotonic: only sums before `end` count
            end = tl.minimum(end, tl.min(tl.where(known & (prefix > limit), column, neighbours), 0))
        mass = tl.maximum(mass, tl.max(tl.where(column < end, prefix, 0.0), 0))
        running = tl.max(prefix, 0)
    tl.store(mass_ptr + node, mass)
    tl.store(count_ptr + node, end.to(tl.int64))
