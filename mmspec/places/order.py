"""Decoding orders given as data: groups of places, decided one group after another.

MAR's iterations are such groups, and the blocks of a masked language model; which places of a group a round
decides is up to the rule.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Block, Draft
from mmspec.core.interfaces import DraftSession

__all__ = ["Groups", "OrderSession"]

Groups: TypeAlias = Sequence[tuple[int, int]]  # begin and end of each row's, in its order


class OrderSession(DraftSession):
    """Proposes the places of the group that each row is at, side by side.

    Attributes:
        order: [B, N] the places of every row in the order in which they are decided.
        ends: of each row, how many places are decided at the end of each of its groups.
    """

    order: Tensor
    ends: Sequence[Sequence[int]]

    def open(self, canvas: Canvas) -> Draft:
        """Make room for the output; return a draft of no place: a prompt alone predicts none."""
        canvas.reserve(2 * self.order.shape[1])
        nothing = self.order[:, :0]
        return self.block(canvas, nothing, nothing > 0, [(0, 0)] * len(self.ends))

    def propose(self, canvas: Canvas) -> Draft:
        groups = [group_after(ends, self.count_decided(row, canvas)) for row, ends in enumerate(self.ends)]
        begin, end = groups[0]
        if groups.count(groups[0]) == len(groups):
            places = self.order[:, begin:end]
            return self.block(canvas, places, torch.ones_like(places, dtype=torch.bool), groups)
        bounds = torch.tensor(groups, device=canvas.device).T[:, :, None]
        width = max(end - begin for begin, end in groups)
        index = bounds[0] + torch.arange(width, device=canvas.device)
        places = self.order.gather(1, index.clamp_max(self.order.shape[1] - 1))
        return self.block(canvas, places, index < bounds[1], groups)

    @abstractmethod
    def count_decided(self, row: int, canvas: Canvas) -> int:
        """Count the places of a row that are decided, from the first of its order on without a gap."""

    @abstractmethod
    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> Block:
        """Build the draft of one kind of target.

        Args:
            canvas: the output so far.
            places: [B, L] of the groups.
            exists: [B, L] False behind the end of a group that is smaller than others.
            groups: that the rows are at.
        """


def group_after(ends: Sequence[int], decided: int) -> tuple[int, int]:
    """Begin and end of the group that comes when so many places are decided; the last one behind all."""
    group = min(bisect_right(ends, decided), len(ends) - 1)
    return ends[group - 1] if group else 0, ends[group]
