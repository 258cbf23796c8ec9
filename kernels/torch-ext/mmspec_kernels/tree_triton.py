"""Triton kernels of `tree.py` and their launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # pairs of nodes that a program looks at


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
    """Columns and rows of the part of [n, n] that a program holds."""
    size = max(16, triton.next_power_of_2(nodes))
    return size, max(1, min(size, ELEMENTS // size))
