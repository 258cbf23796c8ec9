"""Cells of an image in the order of a masked autoregressive model (MAR, 2406.11838): several in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.decoding.draft import DraftKind
from mmspec.decoding.interfaces import DraftSession, PromptOutput, Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.drafters.cell_orders import CellOrder, CellOrderSession

__all__ = ["CellOrderDrafter"]


class CellOrderDrafter(CellOrder):
    """Decides the cells of an image in an order of their own; arguments as of `CellOrder`."""

    kind = DraftKind.POINT

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Any, random: RandomStream
    ) -> DraftSession:
        grids = [request.grid for request in requests if request.grid is not None]
        return CellOrderSession(self, grids, prefill.logits.device, random)
