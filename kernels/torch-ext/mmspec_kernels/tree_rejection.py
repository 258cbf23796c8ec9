"""Recursive rejection sampling down a draft tree, with one decision among siblings per level.

The kernel runs one program per row of the batch. Accepting a child reads two numbers. Rejecting a child reads
p and q twice: for the sum of the residual, and for its normalization. The residual of p is stored in the
output, and the rest of q, for draws without replacement, in a separate buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton, with_row_stride
from .chain import normalise, residual

Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function: (p [B, V], children [B, K] or -1, u [B, K]) -> (chosen child [B] or -1, the distribution to draw
from if none was chosen [B, V])."""
BLOCK = 4096  # tokens per step of a program
WARPS = 8


def descend(p: Tensor, children: Tensor, u: Tensor, judge: Judge) -> tuple[Tensor, Tensor]:
    """Walk down from the root; `judge` selects a child of each node on the way.

    Args:
        p: [B, n, V] the target's distribution after each node.
        children: [B, n, K] children of each node, padded with -1.
        u: [B, D, K] uniforms per depth and sibling.

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


@operator(fake=lambda p, q, tokens, *_: (tokens.new_empty(len(tokens)), p.new_empty(len(p), p.shape[-1])))
def reject_tree(
    p: Tensor, q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    """Verify siblings in the order of their draws, each against the residual that earlier ones left.

    SpecInfer, 2305.09781; MCSD, 2401.06706. On a rejection p <- norm((p - q)+); for siblings drawn
    without replacement also q(x) <- 0, renormalized. Candidates with q(x) = 0 are skipped.

    Args:
        p: [B, n, V] the target's distribution after each node.
        q: [B, n - 1, V] the distribution that each candidate was drawn from; that of the first sibling is
            used for all.
        tokens: [B, n] int64 ids of the nodes.
        children: [B, n, K] int64 from `tree_children`.
        u: [B, D, K] uniforms of each depth and sibling.
        without_replacement: whether each drawn sibling was removed from q before the next draw.

    Returns:
        [B] the last accepted node; [B, V] the distribution of the token after it: p of that node, or the
        residual after its rejected children.
    """
    if use_triton(p.device) and p.dtype == torch.float32:
        return reject_tree_triton(p, q, tokens, children, u, without_replacement)
    return _reject_tree(p, q, tokens, children, u, without_replacement)


def _reject_tree(
    draft_p: Tensor, draft_q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    row = torch.arange(len(tokens), device=tokens.device)

    def judge(p: Tensor, children: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        candidates = children.clamp_min(0)
        q = draft_q[row, (candidates[:, 0] - 1).clamp_min(0)]
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


@launcher
def reject_tree_triton(
    p: Tensor, q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    """Launch `reject_tree`: p [B, n, V], tokens [B, n], children [B, n, K], u [B, D, K] -> [B], [B, V]."""
    rows, nodes, vocabulary = p.shape
    node, final = tokens.new_empty(rows), p.new_empty(rows, vocabulary)
    if rows:
        q, q_stride = with_row_stride(q)
        _reject_kernel[(rows,)](
            p.contiguous(),
            q,
            tokens.contiguous(),
            children.contiguous(),
            u.contiguous(),
            node,
            final,
            torch.empty_like(final) if without_replacement else None,
            q_stride,
            nodes,
            vocabulary,
            u.shape[1],
            u.shape[2],
            WITHOUT_REPLACEMENT=without_replacement,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=WARPS,
        )
    return node, final


@triton.jit
def _either(fresh_ptr, used_ptr, token, fresh, vocabulary):
    """Load from the first row for tokens below `fresh`, and from the second row for the others."""
    number = tl.load(fresh_ptr + token, mask=token < fresh, other=0.0).to(tl.float32)
    mask = (token >= fresh) & (token < vocabulary)
    return number + tl.load(used_ptr + token, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _reject_kernel(
    p_ptr,
    q_ptr,
    tokens_ptr,
    children_ptr,
    u_ptr,
    node_ptr,
    final_ptr,
    rest_ptr,
    q_stride,
    nodes,
    vocabulary,
    levels,
    siblings,
    WITHOUT_REPLACEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_ptr += row * nodes * vocabulary
    q_ptr += row * q_stride
    tokens_ptr += row * nodes
    children_ptr += row * nodes * siblings
    u_ptr += row * levels * siblings
    final_ptr += row * vocabulary
    if WITHOUT_REPLACEMENT:
        rest_ptr += row * vocabulary
    index = tl.arange(0, BLOCK)
    tiny = 1.1754943508222875e-38
    node = tl.full([], 0, tl.int64)
    chosen = tl.full([], 0, tl.int64)  # the last accepted child; -1 after a level without one
    refused = tl.full([], 0, tl.int32)  # rejected children of `node`; after the first, p is in final_ptr
    for level in range(levels):
        if chosen >= 0:
            node = chosen
            chosen = tl.full([], -1, tl.int64)
            refused = tl.full([], 0, tl.int32)
            first = tl.maximum(tl.load(children_ptr + node * siblings) - 1, 0)  # row of q of the candidates
            here = p_ptr + node * vocabulary
            there = q_ptr + first * vocabulary
            for sibling in range(siblings):
                child = tl.load(children_ptr + node * siblings + sibling)
                if (child >= 0) & (chosen < 0):
                    x = tl.load(tokens_ptr + child)
                    u = tl.load(u_ptr + level * siblings + sibling).to(tl.float32)
                    fresh = tl.where(refused == 0, vocabulary, 0)  # all tokens or none
                    p_x = _either(here, final_ptr, x, fresh, vocabulary)
                    if WITHOUT_REPLACEMENT:
                        q_x = _either(there, rest_ptr, x, fresh, vocabulary)
                    else:
                        q_x = tl.load(there + x).to(tl.float32)
                    if (q_x > 0) & (u * q_x <= p_x) & (p_x > 0):
                        chosen = child
                    elif q_x > 0:
                        left_p = tl.zeros([BLOCK], tl.float32)
                        left_q = tl.zeros([BLOCK], tl.float32)
                        for start in range(0, vocabulary, BLOCK):
                            token = start + index
                            p = _either(here, final_ptr, token, fresh, vocabulary)
                            if WITHOUT_REPLACEMENT:
                                q = _either(there, rest_ptr, token, fresh, vocabulary)
                                left_q += tl.where(token == x, 0.0, q)
                            else:
                                q = tl.load(there + token, mask=token < vocabulary, other=0.0).to(tl.float32)
                            left_p += tl.maximum(p - q, 0.0)
                        total_p = tl.sum(left_p)
                        total_q = tl.sum(left_q)
                        for start in range(0, vocabulary, BLOCK):
                            token = start + index
                            inside = token < vocabulary
                            p = _either(here, final_ptr, token, fresh, vocabulary)
                            if WITHOUT_REPLACEMENT:
                                q = _either(there, rest_ptr, token, fresh, vocabulary)
                                rest = tl.where(token == x, 0.0, q)
                                rest = tl.where(total_q > 0, rest / tl.maximum(total_q, tiny), rest)
                                tl.store(rest_ptr + token, rest, mask=inside)
                            else:
                                q = tl.load(there + token, mask=inside, other=0.0).to(tl.float32)
                            residual = tl.maximum(p - q, 0.0) / tl.maximum(total_p, tiny)
                            tl.store(final_ptr + token, tl.where(total_p > 0, residual, p), mask=inside)
                        refused += 1
                        tl.debug_barrier()  # other threads read the written values
    fresh = tl.where((chosen >= 0) | (refused == 0), vocabulary, 0)
    node = tl.where(chosen >= 0, chosen, node)
    tl.store(node_ptr + row, node)
    for start in range(0, vocabulary, BLOCK):
        token = start + index
        p = tl.load(p_ptr + node * vocabulary + token, mask=token < fresh, other=0.0)
        tl.store(final_ptr + token, p, mask=token < fresh)
