"""Random draft trees as plain tensors, for tests of kernels."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """Trees [B, n], with the bounds that the host knows of them."""

    parents: Tensor
    valid: Tensor
    max_depth: int
    max_children: int


def random_tree(rows: int, nodes: int, seed: int = 0, lean: float = 0.5, device: str = "cpu") -> Tree:
    """Trees whose nodes hang below the one before them with probability `lean`, else below any."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(nodes)
    parents = (torch.rand(rows, nodes, generator=generator) * order).long()
    below = torch.rand(rows, nodes, generator=generator) < lean
    parents = torch.where(below, order - 1, parents).clamp_min(0)
    valid = torch.rand(rows, nodes, generator=generator) < 0.8
    valid[:, 0] = True
    deepest = max(len(path_up(row, node)) - 1 for row in parents.tolist() for node in range(nodes))
    widest = max(row[1:].count(node) for row in parents.tolist() for node in range(nodes))
    return Tree(parents.to(device), valid.to(device), deepest, widest)


def path_up(parents: list[int], node: int) -> list[int]:
    """The path from a root to a node."""
    path = [node]
    while parents[path[0]] != path[0]:
        path.insert(0, parents[path[0]])
    return path


def guarded(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Tensor:
    """A tensor whose neighbours in memory hold a poison."""
    size = int(torch.Size(shape).numel())
    memory = torch.full((size + 64,), value, dtype=dtype)
    return memory[32 : 32 + size].view(shape)
