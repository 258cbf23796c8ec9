"""Accepted path of a draft: its last node, its nodes, and the tokens that it decides.

A chain has no ancestors and depths (None): node i is at depth i after all nodes before it. Kernels run one
program per row of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton

Path = tuple[Tensor, Tensor, Tensor]
"""[B, D + 1] nodes from the root down, padded; [B] depth of the last one; [B, D + 1] or [B, D + 1, d]
values decided after each node: that of the next node, and the given next value after the last node."""
ELEMENTS = 1024  # pairs of nodes per step of a program


@operator(fake=lambda passes, *_: passes.new_empty(len(passes), dtype=torch.int64))
def deepest_node(passes: Tensor, ancestors: Tensor | None, depth: Tensor | None) -> Tensor:
    """Find the deepest node whose whole path passes; the root always passes.

    Args:
        passes: [B, n] bool.
        ancestors: [B, n, n] bool from `tree_paths`; None for chains.
        depth: [B, n] int64 from `tree_paths`; None for chains.

    Returns:
        [B] index of the node; ties prefer the lower index.
    """
    if use_triton(passes.device):
        return deepest_node_triton(passes, ancestors, depth)
    if ancestors is None or depth is None:
        return ((~passes[:, 1:]).cumsum(-1) == 0).sum(-1)
    reached = (passes[:, None, 1:] | ~ancestors[:, :, 1:]).all(-1)
    return torch.where(reached, depth, -1).argmax(-1)


def _fake_path(tokens: Tensor, *arguments: Any) -> Path:
    rows, steps = len(tokens), arguments[-1] + 1
    path = tokens.new_empty(rows, steps, dtype=torch.int64)
    return path, path.new_empty(rows), tokens.new_empty(rows, steps, *tokens.shape[2:])


@operator(fake=_fake_path)
def path_to(
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    node: Tensor,
    next_token: Tensor,
    max_depth: int,
) -> Path:
    """Find the path to one node of each row, and the values that it decides.

    Args:
        tokens: [B, n] int64 ids, or [B, n, d] vectors, of the nodes.
        ancestors, depth: see `deepest_node`.
        node: [B] int64.
        next_token: [B] or [B, d] value after that node.
        max_depth: upper bound D of the depths; n - 1 for chains.
    """
    if use_triton(tokens.device) and tokens.dim() == 2:
        return path_to_triton(tokens, ancestors, depth, node, next_token, max_depth)
    if not max_depth:  # only the root, as in every round of plain decoding
        return torch.zeros_like(node)[:, None], torch.zeros_like(node), next_token[:, None].clone()
    rows, nodes = tokens.shape[:2]
    index = torch.arange(nodes, device=node.device).repeat(rows, 1)
    if ancestors is None or depth is None:
        path, accepted, values = index, node.clone(), tokens.roll(-1, 1)
    else:
        accepted = depth.gather(1, node[:, None])[:, 0]
        # nodes off the path go to an extra column that is dropped: static shapes, no loop
        column = torch.where(_pick(ancestors, node[:, None])[:, 0], depth, max_depth + 1)
        path = node.new_zeros(rows, max_depth + 2).scatter(1, column, index)[:, :-1].contiguous()
        values = _pick(tokens, path).roll(-1, 1)
    values.scatter_(1, _widened(accepted[:, None], values), next_token[:, None])
    return path, accepted, values


@operator(fake=_fake_path)
def match_path(
    tokens: Tensor,
    choice: Tensor,
    parents: Tensor,
    valid: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Path:
    """Follow the children that equal the target's choice, from the root down (greedy and sample-and-match).

    With equal siblings, the longest such path is taken.

    Args:
        tokens: [B, n] int64 ids, or [B, n, d] vectors, of the nodes.
        choice: the target's value after each node, of the same shape.
        parents: [B, n] int64 index of each node's parent.
        valid: [B, n] False for nodes that are never accepted.
        ancestors, depth, max_depth: see `path_to`.
    """
    if use_triton(tokens.device) and tokens.dim() == 2:
        return match_path_triton(tokens, choice, parents, valid, ancestors, depth, max_depth)
    equal = tokens == _pick(choice, parents)
    node = deepest_node(valid & (equal if equal.dim() == 2 else equal.all(-1)), ancestors, depth)
    return path_to(tokens, ancestors, depth, node, _pick(choice, node[:, None])[:, 0], max_depth)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Gather values [B, n, ...] at index [B, m] of each row -> [B, m, ...]."""
    return values.gather(1, _widened(index, values))


def _widened(index: Tensor, values: Tensor) -> Tensor:
    if values.dim() == 2:
        return index
    return index.view(*index.shape, *[1] * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])


def deepest_node_triton(passes: Tensor, ancestors: Tensor | None, depth: Tensor | None) -> Tensor:
    """Launch `deepest_node`: passes [B, n] -> [B] int64."""
    node = passes.new_empty(len(passes), dtype=torch.int64)
    _launch(passes, 0, passes=passes, ancestors=ancestors, depth=depth, accepted=node)
    return node


def path_to_triton(
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    node: Tensor,
    next_token: Tensor,
    max_depth: int,
) -> Path:
    """Launch `path_to`: tokens [B, n], node and next_token [B] -> [B, D + 1], [B], [B, D + 1]."""
    path, accepted, values = _fake_path(tokens, max_depth)
    out = {"path": path, "accepted": accepted, "values": values}
    draft = {"tokens": tokens, "ancestors": ancestors, "depth": depth}
    _launch(tokens, max_depth, **draft, node=node, choice=next_token, **out)
    return path, accepted, values


def match_path_triton(
    tokens: Tensor,
    choice: Tensor,
    parents: Tensor,
    valid: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Path:
    """Launch `match_path`: all [B, n], ancestors [B, n, n] -> [B, D + 1], [B], [B, D + 1]."""
    path, accepted, values = _fake_path(tokens, max_depth)
    out = {"path": path, "accepted": accepted, "values": values}
    draft = {"tokens": tokens, "parents": parents, "ancestors": ancestors, "depth": depth}
    _launch(tokens, max_depth, **draft, choice=choice, passes=valid, **out)
    return path, accepted, values


POINTERS = (
    *("tokens", "choice", "parents", "depth", "node", "passes", "ancestors"),
    *("accepted", "path", "values"),
)  # pointer arguments of the kernel, in order


def _packed(values: Tensor | None) -> Tensor | None:
    """Make a tensor contiguous; booleans become their bytes."""
    if values is None:
        return None
    return values.contiguous().view(torch.int8) if values.dtype == torch.bool else values.contiguous()


@launcher
def _launch(draft: Tensor, max_depth: int, **given: Tensor | None) -> None:
    """Launch the kernel for drafts of the shape [B, n]; missing pointers are None."""
    rows, nodes = draft.shape
    size = max(16, triton.next_power_of_2(nodes))
    if rows:
        _path_kernel[(rows,)](
            *(_packed(given.get(name)) for name in POINTERS),
            nodes,
            max_depth + 1,
            NODES=size,
            STEPS=triton.next_power_of_2(max_depth + 1),
            BLOCK=max(1, min(size, ELEMENTS // size)),
        )


@triton.jit
def _deepest(fails, ancestors_ptr, depth_ptr, row, nodes, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """The deepest node without a failing node on its path; ancestors_ptr is None for chains."""
    index = tl.arange(0, NODES)
    if ancestors_ptr is None:
        node = tl.min(tl.where(fails, index, nodes)) - 1
    else:
        best = tl.full(
            [], NODES - 1, tl.int32
        )  # key of the root; deeper nodes, then lower indices, have larger keys
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
def _path_kernel(
    tokens_ptr,
    choice_ptr,  # the target's choice after each node; only after `node` if parents_ptr is None
    parents_ptr,  # None if nodes are not compared with the target's choice
    depth_ptr,
    node_ptr,  # node of each row; None to find the deepest
    passes_ptr,
    ancestors_ptr,
    accepted_ptr,  # depth of the last node; the node itself if path_ptr is None
    path_ptr,
    values_ptr,
    nodes,
    steps,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    if node_ptr is not None:
        node = tl.load(node_ptr + row)
    else:
        mask = (index > 0) & (index < nodes)
        fails = tl.load(passes_ptr + row * nodes + index, mask=mask, other=1) == 0
        if parents_ptr is not None:
            parent = tl.load(parents_ptr + row * nodes + index, mask=mask, other=0)
            token = tl.load(tokens_ptr + row * nodes + index, mask=mask, other=0)
            equal = token == tl.load(choice_ptr + row * nodes + parent, mask=mask, other=0)
            fails = mask & (fails | ~equal)
        node = _deepest(fails, ancestors_ptr, depth_ptr, row, nodes, NODES, BLOCK)
    if path_ptr is None:
        tl.store(accepted_ptr + row, node)
    else:
        if parents_ptr is not None:
            next_token = tl.load(choice_ptr + row * nodes + node)
        else:
            next_token = tl.load(choice_ptr + row)
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
            within = index < nodes
            accepted = tl.load(depth_ptr + row * nodes + node)
            place = (row * nodes + node) * nodes + index
            on_path = tl.load(ancestors_ptr + place, mask=within, other=0) != 0
            depth = tl.load(depth_ptr + row * nodes + index, mask=within, other=0)
            tl.store(path_ptr + depth, index.to(tl.int64), mask=on_path)
            token = tl.load(tokens_ptr + index, mask=within, other=0)
            tl.store(values_ptr + depth - 1, token, mask=on_path & (depth > 0))
            padding = (step > accepted) & (step < steps)  # pads with the root
            tl.store(path_ptr + step, tl.zeros([STEPS], tl.int64), mask=padding)
            tl.store(values_ptr + step, tl.zeros([STEPS], tl.int64) + tl.load(tokens_ptr), mask=padding)
        tl.store(values_ptr + accepted, next_token)
        tl.store(accepted_ptr + row, accepted)
