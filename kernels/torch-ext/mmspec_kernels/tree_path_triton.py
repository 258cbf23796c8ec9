"""Triton kernels of `tree_path.py` and their launchers: one program for each row of the batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # pairs of nodes that a program looks at together


@triton.jit
def _deepest(fails, ancestors_ptr, depth_ptr, row, nodes, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """The deepest node without a failing one on its path; of a chain where ancestors_ptr is None."""
    index = tl.arange(0, NODES)
    if ancestors_ptr is None:
        node = tl.min(tl.where(fails, index, nodes)) - 1
    else:
        best = tl.full([], NODES - 1, tl.int32)  # of the root: deeper nodes have larger keys, then lower ones
        for start in range(0, nodes, BLOCK):
            below = start + tl.arange(0, BLOCK)
            place = (row * nodes + below)[:, None] * nodes + index[None, :]
            mask = (below < nodes)[:, None] & (index < nodes)[None, :]
            on_path = tl.load(ancestors_ptr + place, mask=mask, other=0) != 0
            fallen = tl.max((on_path & fails[None, :]).to(tl.int32), 1) > 0
            depth = tl.load(depth_ptr + row * nodes + below, mask=below < nodes, other=0).to(tl.int32)
            key = tl.where(fallen | (below >= nodes), 0, depth * NODES + (NODES - 1 - below))
            best = tl.maximum(best, tl.max(key))
        node = NODES - 1 - best % NODES
    return node


@triton.jit
def _store_path(
    tokens_ptr,
    ancestors_ptr,
    depth_ptr,
    path_ptr,
    accepted_ptr,
    values_ptr,
    row,
    node,
    next_token,
    nodes,
    steps,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
):
    step = tl.arange(0, STEPS)
    tokens_ptr += row * nodes
    path_ptr += row * steps
    values_ptr += row * steps
    if ancestors_ptr is None:
        accepted = node
        tl.store(path_ptr + step, step.to(tl.int64), mask=step < steps)
        below = tl.where(step + 1 < steps, step + 1, 0)
        value = tl.load(tokens_ptr + below, mask=step < steps, other=0)
        tl.store(values_ptr + step, value, mask=(step < steps) & (step != accepted))
    else:
        index = tl.arange(0, NODES)
        within = index < nodes
        accepted = tl.load(depth_ptr + row * nodes + node)
        place = (row * nodes + node) * nodes + index
        on_path = tl.load(ancestors_ptr + place, mask=within, other=0) != 0
        depth = tl.load(depth_ptr + row * nodes + index, mask=within, other=0)
        tl.store(path_ptr + depth, index.to(tl.int64), mask=on_path)
        token = tl.load(tokens_ptr + index, mask=within, other=0)
        tl.store(values_ptr + depth - 1, token, mask=on_path & (depth > 0))
        padding = (step > accepted) & (step < steps)  # as if the root followed
        tl.store(path_ptr + step, tl.zeros([STEPS], tl.int64), mask=padding)
        tl.store(values_ptr + step, tl.zeros([STEPS], tl.int64) + tl.load(tokens_ptr), mask=padding)
    tl.store(values_ptr + accepted, next_token)
    tl.store(accepted_ptr + row, accepted)


@triton.jit
def _deepest_kernel(
    passes_ptr, ancestors_ptr, depth_ptr, node_ptr, nodes, NODES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    fails = tl.load(passes_ptr + row * nodes + index, mask=(index > 0) & (index < nodes), other=1) == 0
    tl.store(node_ptr + row, _deepest(fails, ancestors_ptr, depth_ptr, row, nodes, NODES, BLOCK))


@triton.jit
def _path_kernel(
    tokens_ptr,
    ancestors_ptr,
    depth_ptr,
    node_ptr,
    next_ptr,
    path_ptr,
    accepted_ptr,
    values_ptr,
    nodes,
    steps,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _store_path(
        tokens_ptr,
        ancestors_ptr,
        depth_ptr,
        path_ptr,
        accepted_ptr,
        values_ptr,
        row,
        tl.load(node_ptr + row),
        tl.load(next_ptr + row),
        nodes,
        steps,
        NODES,
        STEPS,
    )


@triton.jit
def _match_kernel(
    tokens_ptr,
    choice_ptr,
    parents_ptr,
    valid_ptr,
    ancestors_ptr,
    depth_ptr,
    path_ptr,
    accepted_ptr,
    values_ptr,
    nodes,
    steps,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    mask = (index > 0) & (index < nodes)
    parent = tl.load(parents_ptr + row * nodes + index, mask=mask, other=0)
    token = tl.load(tokens_ptr + row * nodes + index, mask=mask, other=0)
    choice_ptr += row * nodes
    valid = tl.load(valid_ptr + row * nodes + index, mask=mask, other=0) != 0
    equal = token == tl.load(choice_ptr + parent, mask=mask, other=0)
    fails = mask & (~valid | ~equal)
    node = _deepest(fails, ancestors_ptr, depth_ptr, row, nodes, NODES, BLOCK)
    _store_path(
        tokens_ptr,
        ancestors_ptr,
        depth_ptr,
        path_ptr,
        accepted_ptr,
        values_ptr,
        row,
        node,
        tl.load(choice_ptr + node),
        nodes,
        steps,
        NODES,
        STEPS,
    )


def deepest_node_triton(passes: Tensor, ancestors: Tensor | None, depth: Tensor | None) -> Tensor:
    """Launch `deepest_node`: passes [B, n] -> [B] int64."""
    rows, nodes = passes.shape
    node = passes.new_empty(rows, dtype=torch.int64)
    size, block = _tile(nodes)
    if rows:
        _deepest_kernel[(rows,)](
            _bytes(passes), _bytes(ancestors), _packed(depth), node, nodes, NODES=size, BLOCK=block
        )
    return node


def path_to_triton(
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    node: Tensor,
    next_token: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `path_to`: tokens [B, n], node and next_token [B] -> [B, D + 1], [B], [B, D + 1]."""
    rows, nodes = tokens.shape
    path, values = (tokens.new_empty(rows, max_depth + 1) for _ in range(2))
    accepted = tokens.new_empty(rows)
    if rows:
        _path_kernel[(rows,)](
            tokens.contiguous(),
            _bytes(ancestors),
            _packed(depth),
            node.contiguous(),
            next_token.contiguous(),
            path,
            accepted,
            values,
            nodes,
            max_depth + 1,
            NODES=_tile(nodes)[0],
            STEPS=triton.next_power_of_2(max_depth + 1),
        )
    return path, accepted, values


def match_path_triton(
    tokens: Tensor,
    choice: Tensor,
    parents: Tensor,
    valid: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `match_path`: all [B, n], ancestors [B, n, n] -> [B, D + 1], [B], [B, D + 1]."""
    rows, nodes = tokens.shape
    path, values = (tokens.new_empty(rows, max_depth + 1) for _ in range(2))
    accepted = tokens.new_empty(rows)
    size, block = _tile(nodes)
    if rows:
        _match_kernel[(rows,)](
            tokens.contiguous(),
            choice.contiguous(),
            parents.contiguous(),
            _bytes(valid),
            _bytes(ancestors),
            _packed(depth),
            path,
            accepted,
            values,
            nodes,
            max_depth + 1,
            NODES=size,
            STEPS=triton.next_power_of_2(max_depth + 1),
            BLOCK=block,
        )
    return path, accepted, values


def _bytes(flags: Tensor | None) -> Tensor | None:
    """Booleans as the bytes that they are stored in."""
    return None if flags is None else flags.contiguous().view(torch.int8)


def _packed(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


def _tile(nodes: int) -> tuple[int, int]:
    """Columns and rows of the part of [n, n] that is held at once."""
    size = max(16, triton.next_power_of_2(nodes))
    return size, max(1, min(size, ELEMENTS // size))
