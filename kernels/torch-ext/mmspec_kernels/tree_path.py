"""Accepted path of a draft: where it ends, what is on it, and what is decided by it.

A chain is given without ancestors and depths: node i stands at depth i behind all nodes before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton

Path = tuple[Tensor, Tensor, Tensor]
"""[B, D + 1] nodes from the root down, padded; [B] depth of the last one; [B, D + 1] or [B, D + 1, d] the
value that is decided after each node: that of the node below it, and the next value after the last one."""


def _fake_deepest(passes: Tensor, ancestors: Tensor | None, depth: Tensor | None) -> Tensor:
    return passes.new_empty(len(passes), dtype=torch.int64)


@operator(fake=_fake_deepest)
def deepest_node(passes: Tensor, ancestors: Tensor | None, depth: Tensor | None) -> Tensor:
    """Find the deepest node on whose path all nodes pass; the root always does.

    Args:
        passes: [B, n] bool.
        ancestors: [B, n, n] bool as of `tree_paths`; None for chains.
        depth: [B, n] int64 likewise.

    Returns:
        [B] its index; the lowest among equally deep nodes.
    """
    if use_triton(passes.device):
        from .tree_path_triton import deepest_node_triton

        return deepest_node_triton(passes, ancestors, depth)
    if ancestors is None or depth is None:
        return ((~passes[:, 1:]).cumsum(-1) == 0).sum(-1)
    reached = (passes[:, None, 1:] | ~ancestors[:, :, 1:]).all(-1)
    return torch.where(reached, depth, -1).argmax(-1)


def _fake_path(
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    node: Tensor,
    next_token: Tensor,
    max_depth: int,
) -> Path:
    rows = len(tokens)
    path = node.new_empty(rows, max_depth + 1)
    return path, torch.empty_like(node), tokens.new_empty(rows, max_depth + 1, *tokens.shape[2:])


@operator(fake=_fake_path)
def path_to(
    tokens: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    node: Tensor,
    next_token: Tensor,
    max_depth: int,
) -> Path:
    """Find the path to one node of each row, and the values that are decided by it.

    Args:
        tokens: [B, n] int64 ids, or [B, n, d] vectors, of the nodes.
        ancestors, depth: as of `deepest_node`.
        node: [B] int64.
        next_token: [B] or [B, d] the value after that node.
        max_depth: upper bound D of the depths; n - 1 for chains.
    """
    if use_triton(tokens.device) and tokens.dim() == 2:
        from .tree_path_triton import path_to_triton

        return path_to_triton(tokens, ancestors, depth, node, next_token, max_depth)
    if not max_depth:  # the root alone, as in every round of plain decoding
        return torch.zeros_like(node)[:, None], torch.zeros_like(node), next_token[:, None].clone()
    rows, nodes = tokens.shape[:2]
    index = torch.arange(nodes, device=node.device).repeat(rows, 1)
    if ancestors is None or depth is None:
        path, accepted, values = index, node.clone(), tokens.roll(-1, 1)
    else:
        accepted = depth.gather(1, node[:, None])[:, 0]
        # Nodes off the path are sent to a column that is cut off again: static shapes, no loop.
        column = torch.where(_pick(ancestors, node[:, None])[:, 0], depth, max_depth + 1)
        path = node.new_zeros(rows, max_depth + 2).scatter(1, column, index)[:, :-1].contiguous()
        values = _pick(tokens, path).roll(-1, 1)
    values.scatter_(1, _widened(accepted[:, None], values), next_token[:, None])
    return path, accepted, values


def _fake_match(
    tokens: Tensor,
    choice: Tensor,
    parents: Tensor,
    valid: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Path:
    return _fake_path(
        tokens, ancestors, depth, tokens.new_empty(len(tokens), dtype=torch.int64), choice, max_depth
    )


@operator(fake=_fake_match)
def match_path(
    tokens: Tensor,
    choice: Tensor,
    parents: Tensor,
    valid: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    max_depth: int,
) -> Path:
    """Follow the children that equal the target's choice, from the root down: greedy and sample-and-match.

    Of several such paths (equal siblings) the longest is taken.

    Args:
        tokens: [B, n] int64 ids, or [B, n, d] vectors, of the nodes.
        choice: the target's own value after each node, likewise.
        parents: [B, n] int64 index of each node's parent.
        valid: [B, n] False for nodes that are never accepted.
        ancestors, depth, max_depth: as of `path_to`.
    """
    if use_triton(tokens.device) and tokens.dim() == 2:
        from .tree_path_triton import match_path_triton

        return match_path_triton(tokens, choice, parents, valid, ancestors, depth, max_depth)
    equal = tokens == _pick(choice, parents)
    node = deepest_node(valid & (equal if equal.dim() == 2 else equal.all(-1)), ancestors, depth)
    return path_to(tokens, ancestors, depth, node, _pick(choice, node[:, None])[:, 0], max_depth)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Values [B, n, ...] at index [B, m] of each row -> [B, m, ...]."""
    return values.gather(1, _widened(index, values))


def _widened(index: Tensor, values: Tensor) -> Tensor:
    if values.dim() == 2:
        return index
    return index.view(*index.shape, *[1] * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])
