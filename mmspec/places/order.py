"""Decoding orders as data: groups of places, decided one group after another.

MAR's iterations are such groups, as are the blocks of a masked language model. The rule chooses which places
of a group a round decides.
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

Groups: TypeAlias = Sequence[tuple[int, int]]  # begin and end of each row's group, in its order


class OrderSession(DraftSession):
    """Session that drafts the places of each row's current group, side by side.

    Attributes:
        order: [B, N] the places of every row in decoding order.
        ends: of each row, the number of decided places at the end of each group.
    """

    order: Tensor
    ends: Sequence[Sequence[int]]

    def open(self, canvas: Canvas) -> Draft:
        """Allocate the output; return a draft without places, because a prompt alone predicts none."""
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
        """Count the decided places of a row, from the first of its order to the first gap."""

    @abstractmethod
    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> Block:
        """Build the draft of one kind of target.

        Args:
            canvas: the output so far.
            places: [B, L] of the groups.
            exists: [B, L] False for padding of smaller groups.
            groups: current groups of the rows.
        """


def group_after(ends: Sequence[int], decided: int) -> tuple[int, int]:
    """Begin and end of the group that follows `decided` places; the last one after all places."""
    group = min(bisect_right(ends, decided), len(ends) - 1)
    return ends[group - 1] if group else 0, ends[group]
