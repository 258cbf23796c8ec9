"""Structure of draft trees, computed from the parent of every node."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton


def _fake_paths(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    rows, nodes = parents.shape
    return parents.new_empty(rows, nodes, nodes, dtype=torch.bool), torch.empty_like(parents)


@operator(fake=_fake_paths)
def tree_paths(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Find the ancestors and the depth of every node.

    Args:
        parents: [B, n] int64 index of each node's parent; roots are their own.
        max_depth: upper bound of the depths.

    Returns:
        [B, n, n] True where node j is node i or one of its ancestors; [B, n] number of edges from the root.
    """
    if use_triton(parents.device):
        from .tree_triton import tree_paths_triton

        return tree_paths_triton(parents, max_depth)
    rows, nodes = parents.shape
    reached = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    # Pointer doubling: after k rounds every node knows its 2^k nearest ancestors.
    for _ in range(max_depth.bit_length()):
        reached = reached | reached.gather(1, parents[:, :, None].expand(-1, -1, nodes))
        parents = parents.gather(1, parents)
    return reached, reached.sum(-1) - 1


def _fake_children(parents: Tensor, valid: Tensor, max_children: int) -> Tensor:
    return parents.new_empty(*parents.shape, max_children)


@operator(fake=_fake_children)
def tree_children(parents: Tensor, valid: Tensor, max_children: int) -> Tensor:
    """List the children of every node.

    Args:
        parents: [B, n] int64 index of each node's parent; node 0 is the root.
        valid: [B, n] False for padding, which is nobody's child.
        max_children: upper bound of the children of a node.

    Returns:
        [B, n, max_children] their indices in increasing order, -1 where there are fewer.
    """
    if use_triton(parents.device):
        from .tree_triton import tree_children_triton

        return tree_children_triton(parents, valid, max_children)
    rows, nodes = parents.shape
    index = torch.arange(nodes, device=parents.device)
    is_child = (parents[:, None, :] == index[None, :, None]) & valid[:, None, :] & (index > 0)
    slot = torch.where(is_child, is_child.cumsum(-1) - 1, max_children)  # the last column is cut off again
    table = torch.full((rows, nodes, max_children + 1), -1, device=parents.device)
    return table.scatter(2, slot, index.expand(rows, nodes, nodes))[:, :, :max_children].contiguous()
