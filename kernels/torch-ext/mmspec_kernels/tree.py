"""Ancestors, depths and children of draft trees, computed from the parent of every node."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton

ELEMENTS = 2048  # pairs of nodes per program


def _fake_paths(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    return parents.new_empty(*parents.shape, parents.shape[1], dtype=torch.bool), torch.empty_like(parents)


@operator(fake=_fake_paths)
def tree_paths(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Find the ancestors and the depth of every node.

    Args:
        parents: [B, n] int64 index of each node's parent; a root is its own parent.
        max_depth: upper bound of the depths.

    Returns:
        [B, n, n] True where node j is node i or one of its ancestors; [B, n] number of edges from the root.
    """
    if use_triton(parents.device):
        return tree_paths_triton(parents, max_depth)
    rows, nodes = parents.shape
    reached = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    # pointer doubling: after k rounds every node has its 2^k nearest ancestors
    for _ in range(max_depth.bit_length()):
        reached = reached | reached.gather(1, parents[:, :, None].expand(-1, -1, nodes))
        parents = parents.gather(1, parents)
    return reached, reached.sum(-1) - 1


@operator(fake=lambda parents, valid, max_children: parents.new_empty(*parents.shape, max_children))
def tree_children(parents: Tensor, valid: Tensor, max_children: int) -> Tensor:
    """List the children of every node.

    Args:
        parents: [B, n] int64 index of each node's parent; node 0 is the root.
        valid: [B, n] False for padding, which has no parent.
        max_children: upper bound of the number of children per node.

    Returns:
        [B, n, max_children] indices of the children in increasing order, padded with -1.
    """
    if use_triton(parents.device):
        return tree_children_triton(parents, valid, max_children)
    rows, nodes = parents.shape
    index = torch.arange(nodes, device=parents.device)
    is_child = (parents[:, None, :] == index[None, :, None]) & valid[:, None, :] & (index > 0)
    slot = torch.where(
        is_child, is_child.cumsum(-1) - 1, max_children
    )  # the last column is dropped afterwards
    table = torch.full((rows, nodes, max_children + 1), -1, device=parents.device)
    return table.scatter(2, slot, index.expand(rows, nodes, nodes))[:, :, :max_children].contiguous()


@launcher
def tree_paths_triton(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Launch `tree_paths`: parents [B, n] -> [B, n, n] bool and [B, n] int64."""
    rows, nodes = parents.shape
    ancestors = parents.new_empty(rows, nodes, nodes, dtype=torch.bool)
    depth = torch.empty_like(parents, memory_format=torch.contiguous_format)
    size, block = _tile(nodes)
    if parents.numel():
        grid = (rows, triton.cdiv(nodes, block))
        _paths_kernel[grid](
            parents.contiguous(), ancestors.view(torch.int8), depth, nodes, max_depth, NODES=size, BLOCK=block
        )
    return ancestors, depth


@launcher
def tree_children_triton(parents: Tensor, valid: Tensor, max_children: int) -> Tensor:
    """Launch `tree_children`: parents and valid [B, n] -> [B, n, max_children] int64."""
    rows, nodes = parents.shape
    children = parents.new_empty(rows, nodes, max_children)
    size, block = _tile(nodes)
    if children.numel():
        _children_kernel[(rows, triton.cdiv(nodes, block))](
            parents.contiguous(),
            valid.contiguous().view(torch.int8),
            children,
            nodes,
            max_children,
            NODES=size,
            CHILDREN=triton.next_power_of_2(max_children),
            BLOCK=block,
        )
    return children


def _tile(nodes: int) -> tuple[int, int]:
    """Columns and rows of a program's part of [n, n]."""
    size = max(16, triton.next_power_of_2(nodes))
    return size, max(1, min(size, ELEMENTS // size))


@triton.jit
def _paths_kernel(
    parents_ptr, ancestors_ptr, depth_ptr, nodes, max_depth, NODES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, NODES)
    parents_ptr += row * nodes
    above = node
    reached = node[:, None] == other[None, :]
    depth = tl.zeros([BLOCK], tl.int64)
    for _ in range(max_depth):
        parent = tl.load(parents_ptr + above, mask=above < nodes, other=0).to(tl.int32)
        depth += (parent != above).to(tl.int64)
        above = parent
        reached = reached | (above[:, None] == other[None, :])
    inside = node < nodes
    tl.store(depth_ptr + row * nodes + node, depth, mask=inside)
    place = (row * nodes + node)[:, None] * nodes + other[None, :]
    tl.store(ancestors_ptr + place, reached.to(tl.int8), mask=inside[:, None] & (other < nodes)[None, :])


@triton.jit
def _children_kernel(
    parents_ptr,
    valid_ptr,
    children_ptr,
    nodes,
    max_children,
    NODES: tl.constexpr,
    CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, NODES)
    within = (other > 0) & (other < nodes)
    parent = tl.load(parents_ptr + row * nodes + other, mask=within, other=0)
    valid = tl.load(valid_ptr + row * nodes + other, mask=within, other=0) != 0
    is_child = (parent[None, :] == node[:, None]) & valid[None, :] & (node < nodes)[:, None]
    count = tl.cumsum(is_child.to(tl.int32), 1)
    begin = children_ptr + (row * nodes + node)[:, None] * max_children
    child = tl.zeros([BLOCK, NODES], tl.int64) + other[None, :]
    tl.store(begin + (count - 1), child, mask=is_child & (count <= max_children))
    slot = tl.arange(0, CHILDREN)
    free = slot[None, :] >= tl.sum(is_child.to(tl.int32), 1)[:, None]
    nobody = tl.full([BLOCK, CHILDREN], -1, tl.int64)
    tl.store(
        begin + slot[None, :], nobody, mask=free & (slot < max_children)[None, :] & (node < nodes)[:, None]
    )
