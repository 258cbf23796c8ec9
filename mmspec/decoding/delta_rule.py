"""Recurrent states of the gated delta rule after any node of a draft tree, in closed form.

`mmspec.kernels.gated_delta_tree` computes what each node adds to the committed state S: its key k and its
update u, under the decay G from that state on. The state after node a is
exp(G_a) S + sum_j exp(G_a - G_j) k_j u_j^T, over its ancestors and itself; none is kept for a node.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["NodeUpdates", "state_after"]


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
