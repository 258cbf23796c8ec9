"""Gated delta rule over a draft tree, in closed form.

The rule (Gated DeltaNet, Yang et al., 2412.06464) processes token by token: with key k, value v, log decay
g <= 0 and step size beta,

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t),    o_t = S_t^T q_t.

Unrolled from the committed state S along the path to node i, where G_i is the sum of g down to it, this is

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_j exp(G_i - G_j) (k_j . k_i) u_j),   j strict ancestors of i,
    o_i = exp(G_i) S^T q_i + sum_j exp(G_i - G_j) (k_j . q_i) u_j,                  j these and i itself.

Parents precede children, so the first line is one unit lower triangular system for all nodes at once, as in a
chunk of the parallel form for sequences (Yang et al., 2406.06484). No per-node state is stored.

One program of the kernel computes one head of one row for a block of value columns, which are independent:

    A_ij = beta_i exp(G_i - G_j) (k_j . k_i) for strict ancestors j of i
    (1 + A) u = beta (v - exp(G) S^T k)

by forward substitution, one node at a time: the inverse is also a short product of powers of A, but these
overflow float32 for similar keys. Each product is three tf32 products, exact to about 2^-21.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton

MOST_NODES = 64  # the kernel holds a nodes x nodes matrix in registers
KEY_BLOCK = 16  # elements of a key per load; 32 spill registers
VALUE_BLOCK = 32  # value columns per program


def _empty(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, nodes, heads, values = v.shape
    keys, u = (rows, heads, nodes, k.shape[3]), (rows, heads, nodes, values)
    return tuple(state.new_empty(shape) for shape in (v.shape, keys, u, u[:3]))  # type: ignore[return-value]


@operator(fake=_empty)
def gated_delta_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the gated delta rule (2412.06464) along every path of a tree, without changing the state.

    Drafts of more than 64 nodes use the torch implementation.

    Args:
        q, k: [B, n, key heads, d_k], not normalized; each key head serves consecutive value heads.
        v: [B, n, heads, d_v].
        g, beta: [B, n, heads] log decay and step size of each node.
        state: [B, heads, d_k, d_v] after the last committed token.
        ancestors: [B, n, n] True where node j is node i or one of its ancestors, j <= i.

    Returns:
        Outputs [B, n, heads, d_v]; normalized keys [B, heads, n, d_k]; u of the rule, [B, heads, n, d_v]; and
        the log decay G from the committed state to each node, inclusive, [B, heads, n]. All have the state's
        dtype.
    """
    if state.dtype == torch.float32 and v.shape[1] <= MOST_NODES and use_triton(state.device):
        return gated_delta_tree_triton(q, k, v, g, beta, state, ancestors)
    return tree_delta_rule(q, k, v, g, beta, state, ancestors)


def tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gated_delta_tree` in torch."""
    shared = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    q, k, v, g, beta = (x.transpose(1, 2).to(state.dtype) for x in (q, k, v, g, beta))
    q, k = norm(q) * q.shape[-1] ** -0.5, norm(k)
    total, decay = path_decay(g, ancestors)
    recalled = total.exp()[..., None] * (k @ state)
    # the solver reads only entries below the diagonal: strict ancestors
    system = beta[..., None] * decay * (k @ k.mT)
    u = torch.linalg.solve_triangular(
        system, beta[..., None] * (v - recalled), upper=False, unitriangular=True
    )
    out = total.exp()[..., None] * (q @ state) + (decay * (q @ k.mT)) @ u
    return out.transpose(1, 2).contiguous(), k.contiguous(), u.contiguous(), total


def path_decay(g: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """Sum log decays along the paths of a tree.

    Args:
        g: [B, heads, n] log decay of each node.
        ancestors: [B, n, n] True where node j is node i or one of its ancestors.

    Returns:
        G [B, heads, n] down to each node, inclusive; and exp(G_i - G_j) [B, heads, n, n], 0 off the path.
    """
    path = ancestors[:, None]
    total = (path.to(g.dtype) @ g[..., None])[..., 0]
    # exp of a difference, not a quotient: exp(-G) overflows, and off the path G_i - G_j may be positive
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~path, float("-inf")).exp()
    return total, decay


def norm(x: Tensor) -> Tensor:
    """L2-normalize vectors [.., d], as other kernels of this rule do."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@launcher
def gated_delta_tree_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch `gated_delta_tree`."""
    rows, nodes, heads, values = v.shape
    key_heads, size = k.shape[2:]
    out = torch.empty(rows, nodes, heads, values, dtype=torch.float32, device=state.device)
    keys = torch.empty(rows, heads, nodes, size, dtype=torch.float32, device=state.device)
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
    """A block of all keys, and the matching rows of the state."""
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
    here = (row * nodes + node) * HEADS + head  # index in [B, n, heads]
    there = (row * HEADS + head) * nodes + node  # index in [B, heads, n]

    # G, and the decay from each ancestor
    pair = exists[:, None] & exists[None, :]
    path = tl.load(path_ptr + row * path_row + node[:, None] * nodes + node[None, :], mask=pair, other=0) != 0
    g = tl.load(g_ptr + here, mask=exists, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + here, mask=exists, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(path, g[None, :], 0.0), 1)
    # G of each node along the other axis of the matrix
    across = tl.sum(tl.where(node[:, None] == node[None, :], total[:, None], 0.0), 0)
    decay = tl.exp(tl.where(path, total[:, None] - across[None, :], float("-inf")))

    # products of keys with keys and the state; normalized afterwards
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
        weight = tl.sum(
            tl.where((node == done)[None, :], system, 0.0), 1
        )  # weight of node `done` in later nodes
        known = tl.sum(tl.where((node == done)[:, None], u, 0.0), 0)
        u -= weight[:, None] * known[None, :]

    # products of queries last, to save registers
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
