"""Redraw of tokens from new distributions by maximal coupling with the old tokens (MC-SJD).

The kernel runs one program per position. Keeping a token reads two numbers. Drawing a token reads p and q
twice: for the sum, and until the cumulative sum passes the target. Sums are in float64, as in torch, because
the uniforms have 48 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton, with_row_stride

BLOCK = 2048  # tokens per step of a program
WARPS = 8


@operator(fake=lambda p, q, tokens, valid, old, u: tokens.new_empty(old.shape))
def redraw(p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, old: Tensor, u: Tensor) -> Tensor:
    """Draw a token from p at each position, and keep the old token with the highest possible probability.

    The old x ~ q is kept with probability min(1, p(x) / q(x)). Otherwise the token is drawn from
    norm((p - q)+). The result has the distribution p (MC-SJD, 2510.24211).

    Args:
        p: [B, W, V] new distribution of each position.
        q: [B, n - 1, V] distributions that the old tokens were drawn from, without the first.
        tokens: [B, n] int64 old tokens; the first belongs to no position.
        valid: [B, n] False where an old token is invalid.
        old: [B, W] int64 index of the old token of each position; 0 for none.
        u: [B, W, 3] float64 uniforms of 24 bits each: one decides, two draw as in `invert`.

    Returns:
        [B, W] tokens.
    """
    if use_triton(p.device) and p.dtype == torch.float32:
        return redraw_triton(p, q, tokens, valid, old, u)
    if tokens.shape[1] == 1:
        return invert(p, u[..., 1:])
    x, q = tokens.gather(1, old), q.gather(1, (old - 1).clamp_min(0)[:, :, None].expand_as(p))
    p_x, q_x = (values.gather(-1, x[:, :, None])[..., 0] for values in (p, q))
    tried = (old > 0) & valid.gather(1, old)
    keep = tried & (u[..., 0] * q_x <= p_x) & (p_x > 0)
    left = (p - q).clamp_min(0.0)
    is_refused = tried & ~keep & (left.sum(-1) > 0)  # p - q may round to zero
    final = torch.where(is_refused[:, :, None], left, p)
    return torch.where(keep, x, invert(final, u[..., 1:]))


def invert(p: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [B, n] from p [B, n, V] by inversion, with two random numbers per position instead of V.

    Args:
        p: weights of at least 0; they need not sum to one.
        u: [B, n, 2] uniforms of 24 bits each; together they resolve every float32 probability.
    """
    return invert_often(p, u[:, :, None])[..., 0]


def invert_often(p: Tensor, u: Tensor) -> Tensor:
    """Draw k tokens from each p, independently: p [B, n, V], u [B, n, k, 2] as in `invert` -> [B, n, k]."""
    cumulative = p.double().cumsum(-1)
    target = (u[..., 0] + (u[..., 1] - 0.5) * 2**-24) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_max(p.shape[-1] - 1)


@launcher
def redraw_triton(p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, old: Tensor, u: Tensor) -> Tensor:
    """Launch `redraw`: p [B, W, V], q [B, n - 1, V], tokens, valid [B, n], old, u [B, W, ...] -> [B, W]."""
    rows, places, vocabulary = p.shape
    out = tokens.new_empty(rows, places)
    if out.numel():
        q, q_stride = with_row_stride(q)
        _redraw_kernel[(rows * places,)](
            p.contiguous(),
            q,
            *(each.contiguous() for each in (tokens, valid, old, u)),
            out,
            q_stride,
            places,
            tokens.shape[1],
            vocabulary,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=WARPS,
        )
    return out


@triton.jit
def _left(p_ptr, q_ptr, token, vocabulary, taken):
    """Compute (p - q)+ of a block; with `taken` = 0 instead of the vocabulary, q counts as zero."""
    p = tl.load(p_ptr + token, mask=token < vocabulary, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + token, mask=token < taken, other=0.0).to(tl.float32)
    return tl.maximum(p - q, 0.0).to(tl.float64)


@triton.jit
def _redraw_kernel(
    p_ptr,
    q_ptr,
    tokens_ptr,
    valid_ptr,
    old_ptr,
    u_ptr,
    out_ptr,
    q_stride,
    places,
    nodes,
    vocabulary,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    old = tl.load(old_ptr + place)
    row = place // places
    node = row * nodes + old
    p_ptr += place * vocabulary
    q_ptr += row * q_stride + tl.maximum(old - 1, 0) * vocabulary
    tried = (old > 0) & (tl.load(valid_ptr + node) != 0)
    x = tl.load(tokens_ptr + node)
    p_x, q_x = tl.load(p_ptr + x).to(tl.float32), tl.load(q_ptr + x, mask=tried, other=0.0).to(tl.float32)
    keep = tried & (tl.load(u_ptr + place * 3) * q_x.to(tl.float64) <= p_x.to(tl.float64)) & (p_x > 0)
    if not keep:
        taken = tl.where(tried, vocabulary, 0)
        index = tl.arange(0, BLOCK)
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocabulary, BLOCK):
            sums += _left(p_ptr, q_ptr, start + index, vocabulary, taken)
        total = tl.sum(sums)
        if total == 0:  # p - q rounded to zero: draw from p
            taken = 0
            for start in range(0, vocabulary, BLOCK):
                sums += _left(p_ptr, q_ptr, start + index, vocabulary, taken)
            total = tl.sum(sums)
        high, low = tl.load(u_ptr + place * 3 + 1), tl.load(u_ptr + place * 3 + 2)
        target = (high + (low - 0.5) * 5.9604644775390625e-08) * total  # 2^-24
        below = tl.zeros([], tl.float64)
        passed = tl.zeros(
            [BLOCK], tl.int32
        )  # number of tokens whose cumulative sum does not exceed the target
        for start in range(0, vocabulary, BLOCK):
            if below <= target:
                token = start + index
                left = _left(p_ptr, q_ptr, token, vocabulary, taken)
                passed += ((below + tl.cumsum(left, 0) <= target) & (token < vocabulary)).to(tl.int32)
                below += tl.sum(left)
        x = tl.minimum(tl.sum(passed), vocabulary - 1).to(tl.int64)
    tl.store(out_ptr + place, x)
