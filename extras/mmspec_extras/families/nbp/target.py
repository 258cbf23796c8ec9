"""NBP (2502.07737) as a target: each forward pass decides a block of a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.core.draft import Nodes
from mmspec.families.par.target import PARTarget
from mmspec.families.parallel_images.target import CellGroup


@dataclass(frozen=True)
class RecentBlocks(CellGroup):
    """A block of a clip that sees only the first block and some of the most recent ones.

    Attributes:
        context_blocks: number of most recent blocks that are kept.
    """

    context_blocks: int


class NBPTarget(PARTarget):
    """Adapter from a model that predicts the next block of a clip (NBP, 2502.07737).

    The first block is decoded token by token. Its last token and n - 1 special tokens predict the second
    block; from then on, token j of a block predicts token j of the next. A block sees itself and all blocks
    before it. Its tokens are final when they are read, so that their keys need no further forward pass.
    """

    def __init__(self, model: Any, vq: Any = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        self.published = {"guidance_scale": 1.0, "top_k": 16000, "top_p": 0.9}
        self.plain = {"order": "blocks", "block_size": self.group_size}

    def nodes(self, draft: CellGroup) -> Nodes:
        nodes, size = super().nodes(draft), self.group_size
        if not isinstance(draft, RecentBlocks):
            return nodes
        # the first block keeps its slots; each later block overwrites the oldest of the kept ones
        junk = self.grid.cells
        kept = min(draft.context_blocks, junk // size - 1)
        newest = draft.begin // size - 1
        blocks = [0, *(newest - (newest - 1 - lane) % kept for lane in range(kept))]
        held = [
            block * size + place if block > 0 or not lane else junk  # no block yet
            for lane, block in enumerate(blocks)
            for place in range(size)
        ]
        held += range(junk, nodes.extent)  # special tokens last
        at = {slot: index for index, slot in enumerate(held)}
        device = nodes.slots.device
        compact = torch.tensor([at.get(slot, at[junk]) for slot in range(nodes.extent)], device=device)
        column = torch.tensor(held, device=device)
        return Nodes(
            nodes.tokens,
            compact[nodes.slots],
            nodes.depths[:, column],
            nodes.visible[:, :, column],
            nodes.deepest,
        )
