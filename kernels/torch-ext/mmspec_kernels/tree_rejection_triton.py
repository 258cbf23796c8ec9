"""Triton kernel of `tree_rejection.py` and its launcher: one program for each row of the batch.

Accepting a child reads two numbers. Refusing one reads p and q twice: the sums of what they leave, and then
what they leave, divided; that is kept in the output, and for draws without replacement in a row of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens that a program holds at once
WARPS = 8


@triton.jit
def _either(fresh_ptr, used_ptr, token, fresh, vocabulary):
    """Numbers of tokens: from the first row for those below `fresh`, from the second for the others."""
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
    nodes,
    vocabulary,
    levels,
    siblings,
    WITHOUT_REPLACEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_ptr += row * nodes * vocabulary
    q_ptr += row * nodes * vocabulary
    tokens_ptr += row * nodes
    children_ptr += row * nodes * siblings
    u_ptr += row * levels * siblings
    final_ptr += row * vocabulary
    if WITHOUT_REPLACEMENT:
        rest_ptr += row * vocabulary
    index = tl.arange(0, BLOCK)
    tiny = 1.1754943508222875e-38
    node = tl.full([], 0, tl.int64)
    chosen = tl.full([], 0, tl.int64)  # the child that was accepted last; -1 from where none was
    refused = tl.full([], 0, tl.int32)  # children of `node`; from the first on, p is in final_ptr
    for level in range(levels):
        if chosen >= 0:
            node = chosen
            chosen = tl.full([], -1, tl.int64)
            refused = tl.full([], 0, tl.int32)
            first = tl.maximum(tl.load(children_ptr + node * siblings), 0)
            here = p_ptr + node * vocabulary
            there = q_ptr + first * vocabulary
            for sibling in range(siblings):
                child = tl.load(children_ptr + node * siblings + sibling)
                if (child >= 0) & (chosen < 0):
                    x = tl.load(tokens_ptr + child)
                    u = tl.load(u_ptr + level * siblings + sibling).to(tl.float32)
                    fresh = tl.where(refused == 0, vocabulary, 0)  # all, or none
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
                        tl.debug_barrier()  # other threads read what was written
    fresh = tl.where((chosen >= 0) | (refused == 0), vocabulary, 0)
    node = tl.where(chosen >= 0, chosen, node)
    tl.store(node_ptr + row, node)
    for start in range(0, vocabulary, BLOCK):
        token = start + index
        p = tl.load(p_ptr + node * vocabulary + token, mask=token < fresh, other=0.0)
        tl.store(final_ptr + token, p, mask=token < fresh)


def reject_tree_triton(
    p: Tensor, q: Tensor, tokens: Tensor, children: Tensor, u: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor]:
    """Launch `reject_tree`: p, q [B, n, V], tokens [B, n], children [B, n, K], u [B, D, K] -> [B], [B, V]."""
    rows, nodes, vocabulary = p.shape
    node, final = tokens.new_empty(rows), p.new_empty(rows, vocabulary)
    if rows:
        _reject_kernel[(rows,)](
            p.contiguous(),
            q.contiguous(),
            tokens.contiguous(),
            children.contiguous(),
            u.contiguous(),
            node,
            final,
            torch.empty_like(final) if without_replacement else None,
            nodes,
            vocabulary,
            u.shape[1],
            u.shape[2],
            WITHOUT_REPLACEMENT=without_replacement,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=WARPS,
        )
    return node, final
