"""Speculative sampling of a chain: the number of accepted candidates, and the token after them.

The kernel runs one program for each tile of each row. A program walks down the chain, which reads two numbers
per candidate, and finds the best token of its tile under the residual distribution and under p; p counts if
the residual is zero. A second kernel selects the best tile. One whole row each of p and q is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton, with_row_stride
from .philox import gumbel_tile, philox_gumbel

TILE = 1024  # tokens per program
WARPS = 4
NEG_INF = tl.constexpr(float("-inf"))


@operator(fake=lambda p, q, tokens, *_: (tokens.new_empty(len(tokens)), tokens.new_empty(len(tokens))))
def verify_chain(
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
    """Accept x ~ q with probability min(1, p(x) / q(x)), and draw from norm((p - q)+) after a rejection.

    Leviathan et al., 2211.17192, algorithm 1. The token is drawn from p after the last candidate, after a
    candidate that is invalid or has q(x) = 0, and if p - q rounds to zero.

    Args:
        p: [T, n, V] the target's distribution after each node; node 0 is the root of the chain.
        q: [T, n - 1, V] the distribution that each candidate was drawn from; None for deterministic
            candidates, whose q is one-hot.
        tokens: [T, n] int64 ids of the nodes.
        valid: [T, n] False for padding.
        u: [T, n - 1] uniforms that decide on node 1 and the nodes after it.
        key: [T, 2] Philox keys.
        place: [T] position that keys the noise of a draw after node 0; it grows by one per node.
        stream, step: [T] int64 counters of that noise.

    Returns:
        [T] the last accepted node, and [T] the token after it: the arg-max of log-probabilities and the noise
        of `philox_gumbel`.
    """
    if use_triton(p.device) and p.dtype == torch.float32:
        return verify_chain_triton(p, q, tokens, valid, u, key, place, stream, step)
    return _verify_chain(p, q, tokens, valid, u, key, place, stream, step)


def _verify_chain(
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
    """`verify_chain` in torch."""
    row, last = torch.arange(len(tokens), device=tokens.device), tokens.shape[1] - 1
    x = tokens[:, 1:, None]
    p_x = p[:, :-1].gather(-1, x)[..., 0]
    q_x = torch.ones_like(p_x) if q is None else q.gather(-1, x)[..., 0]
    drawn = valid[:, 1:] & (q_x > 0)
    passes = (u * q_x <= p_x) & (p_x > 0)
    node = (drawn & passes).long().cumprod(-1).sum(-1)
    refused = torch.nn.functional.pad(drawn, (0, 1)).gather(1, node[:, None])  # past the end: False
    after, p = (node + 1).clamp_max(last), p[row, node]
    if q is None or not last:
        left = normalise(p.scatter(-1, tokens[row, after, None], 0.0), otherwise=p)
    else:
        left = residual(p, q[row, after - 1])
    final = torch.where(refused, left, p)
    return node, _draw(final, key, place + node, stream, step)


def _draw(p: Tensor, key: Tensor, place: Tensor, stream: Tensor, step: Tensor) -> Tensor:
    """Draw a token from each p [T, V], by the Gumbel-max trick."""
    noise = philox_gumbel(key, place[:, None], stream[:, None], p.shape[-1], step[:, None], p.dtype)
    return (p.log() + noise[:, 0]).argmax(-1)


def normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divide weights [..., V] by their sum; `otherwise` where all are zero (p - q rounded to zero)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(weights.dtype).tiny), otherwise)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Residual distribution norm((p - q)+), [..., V] (2211.17192)."""
    return normalise((p - q).clamp_min(0.0), otherwise=p)


@launcher
def verify_chain_triton(
    p: Tensor, q: Tensor | None, tokens: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch `verify_chain`, with its other arguments in order: p [T, n, V] -> node, token [T]."""
    rows, nodes, vocabulary = p.shape
    node, token = tokens.new_empty(rows), tokens.new_empty(rows)
    if rows:
        width = min(TILE, max(16, triton.next_power_of_2(vocabulary)))
        tiles = triton.cdiv(vocabulary, width)
        best = torch.empty(rows, tiles, 2, dtype=torch.float32, device=p.device)
        choice = torch.empty_like(best, dtype=torch.int32)
        q, q_stride = (None, 0) if q is None else with_row_stride(q)
        _tile_kernel[(rows, tiles)](
            p.contiguous(),
            q,
            *(each.contiguous() for each in (tokens, *others)),
            node,
            best,
            choice,
            q_stride,
            nodes,
            vocabulary,
            tiles,
            NODES=triton.next_power_of_2(nodes),
            TILE=width,
            num_warps=WARPS,
        )
        _choice_kernel[(rows,)](best, choice, token, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1)
    return node, token


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
    q_stride,
    nodes,
    vocabulary,
    tiles,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The last accepted node [rows], and a tile's best under residual and under p: [rows, tiles, 2]."""
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
        candidate = row * q_stride + (depth - 1) * vocabulary
        q_x = tl.load(q_ptr + candidate + x, mask=judged, other=0.0).to(tl.float32)
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
        refusal = row * q_stride + node * vocabulary
        q = tl.load(q_ptr + refusal + index, mask=index < taken, other=0.0).to(tl.float32)
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
    """The best token of a row among its tiles; under p if the residual is zero."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    at = (row * tiles + tile) * 2
    left = tl.load(best_ptr + at, mask=tile < tiles, other=NEG_INF)
    p = tl.load(best_ptr + at + 1, mask=tile < tiles, other=NEG_INF)
    nothing = tl.max(left) == NEG_INF
    best = tl.argmax(tl.where(nothing, p, left), 0)
    token = tl.load(choice_ptr + (row * tiles + best) * 2 + nothing.to(tl.int32))
    tl.store(token_ptr + row, token.to(tl.int64))
