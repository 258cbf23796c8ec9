"""Gated delta rule over a draft tree, in closed form.

The rule (Gated DeltaNet, Yang et al., 2412.06464) reads token by token: with key k, value v, log decay g <= 0
and step size beta,

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t),    o_t = S_t^T q_t.

Unrolled from the committed state S along the path to node i, where G_i is the sum of g down to it, this is

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_j exp(G_i - G_j) (k_j . k_i) u_j),   j strict ancestors of i,
    o_i = exp(G_i) S^T q_i + sum_j exp(G_i - G_j) (k_j . q_i) u_j,                  j these and i itself.

Parents stand before children, so the first line is one unit lower triangular system for all nodes at once, as
in a chunk of the parallel form for sequences (Yang et al., 2406.06484). No state is kept for a node: the one
after node a is exp(G_a) S + sum_j exp(G_a - G_j) k_j u_j^T, over its ancestors and itself (`state_after`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NodeUpdates", "state_after", "tree_delta_rule"]


class NodeUpdates(NamedTuple):
    """Update of a recurrent state by each node of a draft.

    Attributes:
        keys: [B, heads, n, d_k].
        values: [B, heads, n, d_v] u above: a value, less what the state before it recalls for its key.
        decay: [B, heads, n] log decay G from the committed state to the node, itself included.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor


def tree_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, NodeUpdates]:
    """Apply the gated delta rule (2412.06464) along every path of a tree, leaving the state as it is.

    Args:
        q, k: [B, n, key heads, d_k], not normed yet; each serves consecutive value heads.
        v: [B, n, heads, d_v].
        g, beta: [B, n, heads] log decay and step size of each node.
        state: [B, heads, d_k, d_v] after the last committed token.
        ancestors: [B, n, n] True where node j is node i or one of its ancestors, j <= i.

    Returns:
        [B, n, heads, d_v] outputs in the state's dtype, and what a commit needs.
    """
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
    return out.transpose(1, 2), NodeUpdates(k, u, total)


def state_after(state: Tensor, updates: NodeUpdates, path: Tensor, node: Tensor) -> Tensor:
    """Recurrent state after one node of each row, in closed form.

    Args:
        state: [B, heads, d_k, d_v] after the last committed token.
        updates: of all nodes.
        path: [B, n] True for the node and its ancestors.
        node: [B].
    """
    keys, values, decay = updates
    last = decay.gather(2, node[:, None, None].expand(-1, decay.shape[1], 1))  # [B, heads, 1]
    weight = (last - decay).masked_fill(~path[:, None], float("-inf")).exp()
    return last.exp()[..., None] * state + (keys * weight[..., None]).mT @ values


def norm(x: Tensor) -> Tensor:
    """Divide vectors [.., d] by their length, as the kernels of this rule do."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
