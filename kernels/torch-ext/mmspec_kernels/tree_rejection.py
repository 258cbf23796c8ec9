"""Rejection down a draft tree, one decision among siblings a level: recursive rejection sampling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .backend import operator, use_triton
from .residual import normalise, residual

Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(p [B, V], children [B, K] or -1, u [B, K]) -> (chosen child [B] or -1, what to draw from if none was
chosen [B, V])."""


def descend(p: Tensor, children: Tensor, u: Tensor, judge: Judge) -> tuple[Tensor, Tensor]:
    """Walk from the root down, with `judge` choosing among the children of each node on the way.

    Args:
        p: [B, n, V] the target's distribution after each node.
        children: [B, n, K] of each node, -1 where there are fewer.
        u: [B, D, K] uniforms of each depth and sibling.

    Returns:
        [B] the last accepted node; [B, V] the distribution of the token after it.
    """
    row = torch.arange(len(p), device=p.device)
    node = torch.zeros_like(row)
    final = here = p[row, node]
    moving = torch.ones_like(row, dtype=torch.bool)
    for depth in range(u.shape[1]):
        chosen, left = judge(here, children[row, node], u[:, depth])
        moved = moving & (chosen >= 0)
        final = torch.where((moving & ~moved)[:, None], left, final)
        node = torch.where(moved, chosen, node)
        here = p[row, node]
        final = torch.where(moved[:, None], here, final)
        moving = moved
    return node, final


def _fake_reject(
    p: Tensor, q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(len(tokens)), p.new_empty(len(p), p.shape[-1])


@operator(fake=_fake_reject)
def reject_tree(
    p: Tensor, q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    """Try the siblings in the order of their draws, each against what the earlier ones left of p.

    SpecInfer, 2305.09781; MCSD, 2401.06706. On a rejection p <- norm((p - q)+); siblings drawn without
    replacement also leave q, q(x) <- 0 renormalised. A candidate to which q gives no mass does not count.

    Args:
        p: [B, n, V] the target's distribution after each node.
        q: [B, n, V] the distribution that each node was drawn from; that of the first sibling counts for all.
        tokens: [B, n] int64 ids of the nodes.
        children: [B, n, K] int64 as of `tree_children`.
        u: [B, D, K] uniforms of each depth and sibling.
        without_replacement: whether siblings were drawn one after another, each removed from q.

    Returns:
        [B] the last accepted node; [B, V] the distribution of the token after it: p of that node, less what
        its refused children took.
    """
    if use_triton(p.device) and p.dtype == torch.float32:
        from .tree_rejection_triton import reject_tree_triton

        return reject_tree_triton(p, q, tokens, children, u, without_replacement)
    return _reject_tree(p, q, tokens, children, u, without_replacement)


def _reject_tree(
    draft_p: Tensor, draft_q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    row = torch.arange(len(tokens), device=tokens.device)

    def judge(p: Tensor, children: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        candidates = children.clamp_min(0)
        q = draft_q[row, candidates[:, 0]]
        chosen = torch.full_like(row, -1)
        for sibling in range(children.shape[1]):
            child = children[:, sibling]
            x = tokens[row, candidates[:, sibling]][:, None]
            p_x, q_x = p.gather(-1, x)[:, 0], q.gather(-1, x)[:, 0]
            tried = (child >= 0) & (chosen < 0) & (q_x > 0)
            accept = tried & (u[:, sibling] * q_x <= p_x) & (p_x > 0)
            chosen = torch.where(accept, child, chosen)
            rejected = (tried & ~accept)[:, None]
            p = torch.where(rejected, residual(p, q), p)
            if without_replacement:
                left = q.scatter(-1, x, 0.0)
                q = torch.where(rejected, normalise(left, otherwise=left), q)
        return chosen, p

    return descend(draft_p, children, u, judge)
