"""Redraw of tokens from new distributions, coupled with the old tokens: maximal coupling (MC-SJD)."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton


def _fake_redraw(p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, old: Tensor, u: Tensor) -> Tensor:
    return tokens.new_empty(old.shape)


@operator(fake=_fake_redraw)
def redraw(p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, old: Tensor, u: Tensor) -> Tensor:
    """Draw a token from p at each place, and keep the place's old one with the largest probability possible.

    The old x ~ q is kept with min(1, p(x) / q(x)); else the token is drawn from norm((p - q)+), which leaves
    it distributed as p (MC-SJD, 2510.24211).

    Args:
        p: [B, W, V] what each place is drawn from.
        q: [B, n, V] what the old tokens were drawn from.
        tokens: [B, n] int64 the old tokens.
        valid: [B, n] False where one means nothing.
        old: [B, W] int64 which of them was in each place; 0 where none was.
        u: [B, W, 3] float64 uniforms of 24 bits each: one decides, two draw as of `invert`.

    Returns:
        [B, W] tokens.
    """
    if use_triton(p.device) and p.dtype == torch.float32:
        from .redraw_triton import redraw_triton

        return redraw_triton(p, q, tokens, valid, old, u)
    return _redraw(p, q, tokens, valid, old, u)


def _redraw(p: Tensor, q: Tensor, tokens: Tensor, valid: Tensor, old: Tensor, u: Tensor) -> Tensor:
    x, q = tokens.gather(1, old), q.gather(1, old[:, :, None].expand_as(p))
    p_x, q_x = (values.gather(-1, x[:, :, None])[..., 0] for values in (p, q))
    tried = (old > 0) & valid.gather(1, old)
    keep = tried & (u[..., 0] * q_x <= p_x) & (p_x > 0)
    left = (p - q).clamp_min(0.0)
    is_refused = tried & ~keep & (left.sum(-1) > 0)  # q = p up to rounding leaves nothing
    final = torch.where(is_refused[:, :, None], left, p)
    return torch.where(keep, x, invert(final, u[..., 1:]))


def invert(p: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [B, n] from p [B, n, V] by inversion: two numbers a place, where Gumbel noise would need V.

    Args:
        p: weights of at least 0; they need not sum to one.
        u: [B, n, 2] uniforms of 24 bits each; together they resolve any probability that float32 can hold.
    """
    cumulative = p.double().cumsum(-1)
    target = (u[..., :1] + (u[..., 1:] - 0.5) * 2**-24) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True)[..., 0].clamp_max(p.shape[-1] - 1)
