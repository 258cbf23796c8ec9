"""Gated delta rule over a draft tree, in closed form.

The rule (Gated DeltaNet, Yang et al., 2412.06464) reads token by token: with key k, value v, log decay g <= 0
and step size beta,

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t),    o_t = S_t^T q_t.

Unrolled from the committed state S along the path to node i, where G_i is the sum of g down to it, this is

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_j exp(G_i - G_j) (k_j . k_i) u_j),   j strict ancestors of i,
    o_i = exp(G_i) S^T q_i + sum_j exp(G_i - G_j) (k_j . q_i) u_j,                  j these and i itself.

Parents stand before children, so the first line is one unit lower triangular system for all nodes at once, as
in a chunk of the parallel form for sequences (Yang et al., 2406.06484). No state is kept for a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton

MOST_NODES = 64  # of the kernel, which holds a matrix of them in registers


def _empty(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, nodes, heads, values = v.shape
    return (
        state.new_empty(rows, nodes, heads, values),
        state.new_empty(rows, heads, nodes, k.shape[3]),
        state.new_empty(rows, heads, nodes, values),
        state.new_empty(rows, heads, nodes),
    )


@operator(fake=_empty)
def gated_delta_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply the gated delta rule (2412.06464) along every path of a tree, leaving the state as it is.

    More than 64 nodes take the torch form.

    Args:
        q, k: [B, n, key heads, d_k], not normed yet; each serves consecutive value heads.
        v: [B, n, heads, d_v].
        g, beta: [B, n, heads] log decay and step size of each node.
        state: [B, heads, d_k, d_v] after the last committed token.
        ancestors: [B, n, n] True where node j is node i or one of its ancestors, j <= i.

    Returns:
        Outputs [B, n, heads, d_v]; the normed keys [B, heads, n, d_k]; u above, [B, heads, n, d_v]; and the
        log decay G from the committed state to each node, itself included, [B, heads, n]. All have the
        state's dtype.
    """
    if state.dtype == torch.float32 and v.shape[1] <= MOST_NODES and use_triton(state.device):
        from .gated_delta_triton import gated_delta_tree_triton

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
    path = ancestors[:, None]
    total = (path.to(g.dtype) @ g[..., None])[..., 0]
    # one exponent, never a quotient of two: exp(-G) overflows, and off the path G_i - G_j may be positive
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~path, float("-inf")).exp()
    recalled = total.exp()[..., None] * (k @ state)
    # the solver reads what lies below the diagonal alone: strict ancestors
    system = beta[..., None] * decay * (k @ k.mT)
    u = torch.linalg.solve_triangular(
        system, beta[..., None] * (v - recalled), upper=False, unitriangular=True
    )
    out = total.exp()[..., None] * (q @ state) + (decay * (q @ k.mT)) @ u
    return out.transpose(1, 2).contiguous(), k.contiguous(), u.contiguous(), total


def norm(x: Tensor) -> Tensor:
    """Divide vectors [.., d] by their length, as the kernels of this rule do."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
