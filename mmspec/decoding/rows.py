"""Rows of a running batch: taking some out, and putting others in, between rounds.

Tensors hold one row for each request along dim 0; under guidance `copies` of the batch stand there one
after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Rows", "join_lists", "join_rows", "part_of_list", "part_of_rows"]

Item = TypeVar("Item")


class Rows(Protocol):
    """Interface of what is kept of each row of a batch between rounds."""

    def part(self, rows: Sequence[int]) -> Self:
        """Return what is kept of some rows, in that order; the whole is not used any more."""

    def joined(self, other: Self) -> Self:
        """Return these rows followed by others, which are not used any more by themselves."""


def part_of_rows(values: Tensor, rows: Sequence[int], copies: int = 1) -> Tensor:
    """Select rows of a tensor, [copies * B, ...] -> [copies * rows, ...]."""
    index = torch.tensor(rows, dtype=torch.long, device=values.device)
    chosen: Tensor = values.unflatten(0, (copies, -1)).index_select(1, index)
    return chosen.flatten(0, 1)


def join_rows(values: Tensor, others: Tensor, copies: int = 1, fill: float = 0) -> Tensor:
    """Join the rows of two tensors, [copies * B, n, ...] and [copies * b, m, ...] -> [copies * (B + b), ...].

    Args:
        values, others: alike but for the number of rows, and for n and m.
        copies: of the batch, in both.
        fill: behind the end of the shorter ones, where n and m differ.
    """
    if values.dim() > 1 and values.shape[1] != others.shape[1]:
        longest = max(values.shape[1], others.shape[1])
        values, others = (_lengthen(each, longest, fill) for each in (values, others))
    parts = [each.unflatten(0, (copies, -1)) for each in (values, others)]
    return torch.cat(parts, 1).flatten(0, 1)


def part_of_list(values: Sequence[Item], rows: Sequence[int], copies: int = 1) -> list[Item]:
    """Select rows of a list of copies * B items."""
    count = len(values) // copies
    return [values[copy * count + row] for copy in range(copies) for row in rows]


def join_lists(values: Sequence[Item], others: Sequence[Item], copies: int = 1) -> list[Item]:
    """Join the rows of two lists, of copies * B items and of copies * b."""
    joined: list[Item] = []
    for copy in range(copies):
        for each in (values, others):
            count = len(each) // copies
            joined += each[copy * count : (copy + 1) * count]
    return joined


def _lengthen(values: Tensor, length: int, fill: float) -> Tensor:
    return pad(values, (0, 0) * (values.dim() - 2) + (0, length - values.shape[1]), value=fill)
