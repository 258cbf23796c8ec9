"""Speculative sampling of a chain: how many candidates are accepted, and the token after them."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton
from .philox import philox_gumbel
from .residual import normalise, residual


def _fake_verify(
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
    return tokens.new_empty(len(tokens)), tokens.new_empty(len(tokens))


@operator(fake=_fake_verify)
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
    """Accept x ~ q with probability min(1, p(x) / q(x)), and draw from norm((p - q)+) where one is refused.

    Leviathan et al., 2211.17192, algorithm 1. Behind the last candidate, or one that was not really drawn,
    the token is drawn from p; likewise where rounding leaves nothing of p - q.

    Args:
        p: [T, n, V] the target's distribution after each node; node 0 is the root of the chain.
        q: [T, n, V] the distribution that each node was drawn from, the root's not read; None for
            candidates that were not drawn at random, whose q is one-hot.
        tokens: [T, n] int64 ids of the nodes.
        valid: [T, n] False for padding.
        u: [T, n - 1] uniforms that decide on node 1 and those after it.
        key: [T, 2] Philox keys.
        place: [T] position that keys the noise of a draw after node 0; one more after each node.
        stream, step: [T] int64, of that noise.

    Returns:
        [T] the last accepted node, and [T] the token after it: the arg-max of log-probabilities and the noise
        of `philox_gumbel`.
    """
    if use_triton(p.device) and p.dtype == torch.float32:
        from .chain_triton import verify_chain_triton

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
    row, last = torch.arange(len(tokens), device=tokens.device), tokens.shape[1] - 1
    x = tokens[:, 1:, None]
    p_x = p[:, :-1].gather(-1, x)[..., 0]
    q_x = torch.ones_like(p_x) if q is None else q[:, 1:].gather(-1, x)[..., 0]
    drawn = valid[:, 1:] & (q_x > 0)
    passes = (u * q_x <= p_x) & (p_x > 0)
    node = (drawn & passes).long().cumprod(-1).sum(-1)
    refused = torch.nn.functional.pad(drawn, (0, 1)).gather(1, node[:, None])  # past the end: False
    after, p = (node + 1).clamp_max(last), p[row, node]
    if q is None:
        left = normalise(p.scatter(-1, tokens[row, after, None], 0.0), otherwise=p)
    else:
        left = residual(p, q[row, after])
    final = torch.where(refused, left, p)
    return node, _draw(final, key, place + node, stream, step)


def _draw(p: Tensor, key: Tensor, place: Tensor, stream: Tensor, step: Tensor) -> Tensor:
    """Draw a token from each p [T, V], by the Gumbel-max trick."""
    noise = philox_gumbel(key, place[:, None], stream[:, None], p.shape[-1], step[:, None], p.dtype)
    return (p.log() + noise[:, 0]).argmax(-1)
