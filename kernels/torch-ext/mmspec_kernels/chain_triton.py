"""Triton kernels of `chain.py` and their launcher.

A program for each tile of each row walks down the chain, which reads two numbers a candidate, and races the
tokens of its tile: among what the refused candidate leaves, and among p, which counts where that is nothing.
The second kernel takes the best tile. Of p and q one row each is read whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_triton import gumbel_tile

TILE = 1024  # tokens that a program races
WARPS = 4
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _best(weight, noise, start):
    """Highest log(weight) + noise of a tile, and its token; -inf where no weight is positive."""
    tiny = 1.1754943508222875e-38
    score = tl.where(weight > 0, tl.log(tl.maximum(weight, tiny)) + noise, NEG_INF)
    return tl.max(score), start + tl.argmax(score, 0)


@triton.jit
def _tile_kernel(
    p_ptr,
    q_ptr,
    tokens_ptr,
    valid_ptr,
    u_ptr,
    key_ptr,
    place_ptr,
    stream_ptr,
    step_ptr,
    node_ptr,
    best_ptr,
    choice_ptr,
    nodes,
    vocabulary,
    tiles,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The last accepted node [rows], and the best of a tile by what is left and by p: [rows, tiles, 2]."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    depth = tl.arange(0, NODES)
    at = row * nodes + depth
    judged = (depth > 0) & (depth < nodes)
    judged = judged & (tl.load(valid_ptr + at, mask=judged, other=0) != 0)
    x = tl.load(tokens_ptr + at, mask=judged, other=0)
    u = tl.load(u_ptr + at - row - 1, mask=judged, other=1.0).to(tl.float32)
    p_x = tl.load(p_ptr + (at - 1) * vocabulary + x, mask=judged, other=0.0).to(tl.float32)
    q_x = tl.full([NODES], 1.0, tl.float32)
    if q_ptr is not None:
        q_x = tl.load(q_ptr + at * vocabulary + x, mask=judged, other=0.0).to(tl.float32)
    drawn = judged & (q_x > 0)
    accepted = (depth == 0) | (drawn & (u * q_x <= p_x) & (p_x > 0))
    node = tl.min(tl.where(accepted, nodes, depth)) - 1
    refused = tl.max((drawn & (depth == node + 1)).to(tl.int32)) > 0

    start = tile * TILE
    index = start + tl.arange(0, TILE)
    inside = index < vocabulary
    here = (row * nodes + node) * vocabulary + index
    p = tl.load(p_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if q_ptr is not None:
        taken = tl.where(refused, vocabulary, 0)  # all of q, or none
        q = tl.load(q_ptr + here + vocabulary, mask=index < taken, other=0.0).to(tl.float32)
        left = p - q
    else:
        left = tl.where(refused & (index == tl.sum(tl.where(depth == node + 1, x, 0))), 0.0, p)
    place = tl.load(place_ptr + row) + node
    noise = gumbel_tile(
        key_ptr + 2 * row, place, tl.load(stream_ptr + row), tl.load(step_ptr + row), start, TILE
    )
    out = (row * tiles + tile) * 2
    best, token = _best(left, noise, start)
    tl.store(best_ptr + out, best)
    tl.store(choice_ptr + out, token)
    best, token = _best(p, noise, start)
    tl.store(best_ptr + out + 1, best)
    tl.store(choice_ptr + out + 1, token)
    tl.store(node_ptr + row, node.to(tl.int64), mask=tile == 0)


@triton.jit
def _choice_kernel(best_ptr, choice_ptr, token_ptr, tiles, TILES: tl.constexpr):
    """The best token of a row, of those of its tiles: of p's where nothing is left."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    at = (row * tiles + tile) * 2
    left = tl.load(best_ptr + at, mask=tile < tiles, other=NEG_INF)
    p = tl.load(best_ptr + at + 1, mask=tile < tiles, other=NEG_INF)
    nothing = tl.max(left) == NEG_INF
    best = tl.argmax(tl.where(nothing, p, left), 0)
    token = tl.load(choice_ptr + (row * tiles + best) * 2 + nothing.to(tl.int32))
    tl.store(token_ptr + row, token.to(tl.int64))


def verify_chain_triton(
    p: Tensor,
    q: Tensor | None,
    tokens: Tensor,
    valid: Tensor,
    u: Tensor,
    key: Tensor,
    place: Tensor,
    stream: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch `verify_chain`: p, q [T, n, V], u [T, n - 1] -> node, token [T]."""
    rows, nodes, vocabulary = p.shape
    node, token = tokens.new_empty(rows), tokens.new_empty(rows)
    if rows:
        width = min(TILE, max(16, triton.next_power_of_2(vocabulary)))
        tiles = triton.cdiv(vocabulary, width)
        best = torch.empty(rows, tiles, 2, dtype=torch.float32, device=p.device)
        choice = torch.empty_like(best, dtype=torch.int32)
        _tile_kernel[(rows, tiles)](
            p.contiguous(),
            None if q is None else q.contiguous(),
            *(each.contiguous() for each in (tokens, valid, u, key, place, stream, step)),
            node,
            best,
            choice,
            nodes,
            vocabulary,
            tiles,
            NODES=triton.next_power_of_2(nodes),
            TILE=width,
            num_warps=WARPS,
        )
        _choice_kernel[(rows,)](best, choice, token, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1)
    return node, token
