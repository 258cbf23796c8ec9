"""The student of Distilled Decoding (2412.17153) as a target, and the drafts with the noise of cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import Drafter
from mmspec.families.lpd.target import LPDTarget
from mmspec.families.parallel_images.target import CellGroup
from mmspec_extras.families.distilled.modeling import DistilledForCausalLM

__all__ = ["DistilledTarget", "NoisyCells"]


@dataclass(frozen=True)
class NoisyCells(CellGroup):
    """Consecutive cells of images, which are decided together from their noise.

    Attributes:
        noise: [B, L] ids of the queries that read the noise of the cells.
    """

    noise: Tensor


class DistilledTarget(LPDTarget):
    """Adapter from a student that maps noise to tokens (2412.17153) to the Target interface.

    A query reads the noise of its cell. It sees the queries before it, and the tokens of earlier forward
    passes. A cell therefore does not depend on the cells that follow it in its forward pass.
    """

    model: DistilledForCausalLM
    any_cells = False
    compared: Any = ("none",)

    def __init__(self, model: Any, vq: Any = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        self.published = {"guidance_scale": 1.0, "temperature": 0.0}
        self.plain = {"order": "raster"}

    def plain_decoding(self) -> tuple[Drafter, None]:
        from mmspec_extras.methods.distilled.drafter import DistilledDrafter  # which imports this module

        return DistilledDrafter().fit(self), None

    def nodes(self, draft: CellGroup) -> Nodes:
        nodes = super().nodes(draft)
        if not isinstance(draft, NoisyCells):
            return nodes
        fresh = draft.fresh.shape[1]
        tokens = torch.cat([nodes.tokens[:, :fresh], draft.noise], 1)
        before = torch.arange(nodes.extent, device=tokens.device) <= nodes.slots[:, :, None]
        return replace(nodes, tokens=tokens, visible=nodes.visible & before)
