"""Triton kernel of `gated_delta.py` and its launcher.

One program computes one head of one row for a block of the values' columns, which do not mix:

    A_ij = beta_i exp(G_i - G_j) (k_j . k_i) for strict ancestors j of i
    (1 + A) u = beta (v - exp(G) S^T k)

by forward substitution, a node at a time: powers of A, of which the inverse is a short product, grow beyond
float32 where keys resemble one another. Products are those of three in tf32, exact to about 2^-21.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_BLOCK = 16  # numbers of a key read at a time; 32 spill registers
VALUE_BLOCK = 32  # columns of values for each program


@triton.jit
def _read_keys(
    k_ptr,
    state_ptr,
    key,
    begin,
    exists,
    column,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """A block of all keys, and what the state holds for it."""
    d = begin + tl.arange(0, KEY_BLOCK)
    inside = d < KEY_SIZE
    k = tl.load(k_ptr + key[:, None] + d[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
    s = tl.load(
        state_ptr + d[:, None] * VALUE_SIZE + column[None, :],
        mask=inside[:, None] & (column < VALUE_SIZE)[None, :],
        other=0.0,
    )
    return k.to(tl.float32), s


@triton.jit
def _tree_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    path_ptr,
    out_ptr,
    keys_ptr,
    u_ptr,
    total_ptr,
    nodes,
    path_row,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    NODES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    node = tl.arange(0, NODES)
    exists = node < nodes
    column = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    held = exists[:, None] & (column < VALUE_SIZE)[None, :]
    here = (row * nodes + node) * HEADS + head  # of [B, n, heads]
    there = (row * HEADS + head) * nodes + node  # of [B, heads, n]

    # G, and the decay from each ancestor
    pair = exists[:, None] & exists[None, :]
    path = tl.load(path_ptr + row * path_row + node[:, None] * nodes + node[None, :], mask=pair, other=0) != 0
    g = tl.load(g_ptr + here, mask=exists, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + here, mask=exists, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(path, g[None, :], 0.0), 1)
    # G of each node again, along the other axis of the matrix
    across = tl.sum(tl.where(node[:, None] == node[None, :], total[:, None], 0.0), 0)
    decay = tl.exp(tl.where(path, total[:, None] - across[None, :], float("-inf")))

    # products of keys with keys and the state; their lengths divide them afterwards
    kk = tl.zeros([NODES, NODES], tl.float32)
    ks = tl.zeros([NODES, VALUE_BLOCK], tl.float32)
    square = tl.zeros([NODES], tl.float32)
    key = ((row * nodes + node) * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_SIZE
    state_ptr += (row * HEADS + head) * KEY_SIZE * VALUE_SIZE
    for begin in range(0, KEY_SIZE, KEY_BLOCK):
        k, s = _read_keys(k_ptr, state_ptr, key, begin, exists, column, KEY_SIZE, VALUE_SIZE, KEY_BLOCK)
        kk += tl.dot(k, tl.trans(k), input_precision="tf32x3")
        ks += tl.dot(k, s, input_precision="tf32x3")
        square += tl.sum(k * k, 1)
    k_scale = 1.0 / tl.sqrt(square + 1e-6)
    k_across = tl.sum(tl.where(node[:, None] == node[None, :], k_scale[:, None], 0.0), 0)

    v = tl.load(v_ptr + here[:, None] * VALUE_SIZE + column[None, :], mask=held, other=0.0).to(tl.float32)
    fade = tl.exp(total)
    u = beta[:, None] * (v - (fade * k_scale)[:, None] * ks)
    strict = node[None, :] < node[:, None]
    system = tl.where(strict, (beta * k_scale)[:, None] * decay * kk * k_across[None, :], 0.0)
    for done in range(0, nodes):
        weight = tl.sum(tl.where((node == done)[None, :], system, 0.0), 1)  # of node `done` in those after it
        known = tl.sum(tl.where((node == done)[:, None], u, 0.0), 0)
        u -= weight[:, None] * known[None, :]

    # those of queries, when the others need no registers any more
    qk = tl.zeros([NODES, NODES], tl.float32)
    qs = tl.zeros([NODES, VALUE_BLOCK], tl.float32)
    square = tl.zeros([NODES], tl.float32)
    for begin in range(0, KEY_SIZE, KEY_BLOCK):
        k, s = _read_keys(k_ptr, state_ptr, key, begin, exists, column, KEY_SIZE, VALUE_SIZE, KEY_BLOCK)
        d = begin + tl.arange(0, KEY_BLOCK)
        mask = exists[:, None] & (d < KEY_SIZE)[None, :]
        q = tl.load(q_ptr + key[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        qk += tl.dot(q, tl.trans(k), input_precision="tf32x3")
        qs += tl.dot(q, s, input_precision="tf32x3")
        square += tl.sum(q * q, 1)
        if tl.program_id(1) == 0:
            tl.store(keys_ptr + there[:, None] * KEY_SIZE + d[None, :], k * k_scale[:, None], mask=mask)
    q_scale = 1.0 / tl.sqrt((square + 1e-6) * KEY_SIZE)
    mixed = q_scale[:, None] * decay * qk * k_across[None, :]
    out = (fade * q_scale)[:, None] * qs + tl.dot(mixed, u, input_precision="tf32x3")
    tl.store(out_ptr + here[:, None] * VALUE_SIZE + column[None, :], out, mask=held)
    tl.store(u_ptr + there[:, None] * VALUE_SIZE + column[None, :], u, mask=held)
    if tl.program_id(1) == 0:
        tl.store(total_ptr + there, total, mask=exists)


def gated_delta_tree_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch `gated_delta_tree`."""
    rows, nodes, heads, values = v.shape
    key_heads, size = k.shape[2:]
    out = torch.empty(rows, nodes, heads, values, device=state.device)
    keys = torch.empty(rows, heads, nodes, size, device=state.device)
    u, total = torch.empty_like(out).view(rows, heads, nodes, values), out.new_empty(rows, heads, nodes)
    path = ancestors if ancestors.stride()[1:] == (nodes, 1) else ancestors.contiguous()
    block = max(16, triton.next_power_of_2(nodes))
    if out.numel():
        _tree_kernel[rows * heads, triton.cdiv(values, VALUE_BLOCK)](
            q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(),
            state.contiguous(), path.view(torch.uint8), out, keys, u, total, nodes, path.stride(0),
            HEADS=heads, KEY_HEADS=key_heads, KEY_SIZE=size, VALUE_SIZE=values,
            NODES=block, KEY_BLOCK=KEY_BLOCK, VALUE_BLOCK=VALUE_BLOCK,
            num_warps=4 if block == 16 else 8, num_stages=1,
        )  # fmt: skip
    return out, keys, u, total
