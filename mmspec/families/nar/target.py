"""Target of NAR (2503.10696): a forward pass reads an anti-diagonal and predicts the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmspec.core.draft import Nodes
from mmspec.core.indexing import pick
from mmspec.core.interfaces import PromptOutput
from mmspec.families.nar.modeling import NARForCausalLM
from mmspec.families.parallel_images.target import CellGroup, ParallelImageTarget
from mmspec.open_types import Keywords
from mmspec.targets.causal import AnyState
from mmspec.targets.image_tokens import AnyVQ

__all__ = ["NARTarget"]


class NARTarget(ParallelImageTarget):
    """Adapter from a model that predicts the cells to the right of and below each cell (NAR, 2503.10696).

    A forward pass reads an anti-diagonal, whose cells see each other and all cells before. The logits of a
    cell of the next anti-diagonal are the mean of the predictions from its left and its upper neighbour, or
    the prediction from the only one that exists.
    """

    plain: Keywords = {"order": "diagonal"}

    def __init__(self, model: NARForCausalLM, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        if model.config.condition_type == "class":  # captions have the settings of LlamaGen
            self.published = {"guidance_scale": 2.0, "top_k": 0}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[AnyState, PromptOutput]:
        """Prefill the prompts; the logits of the first cell are the mean of both predictions."""
        state, output = super().prefill(prompts, capacity, taps)
        right, below = output.logits.chunk(2, -1)
        return state, replace(output, logits=(right + below) / 2)

    def nodes(self, draft: CellGroup) -> Nodes:
        return self.read_fresh(draft)

    def predict(self, logits: Tensor, draft: CellGroup) -> Tensor:
        copies, columns = len(logits) // len(draft.starts), self.grid.columns
        total = torch.zeros(1, device=logits.device, dtype=logits.dtype)
        count = torch.zeros_like(draft.starts)
        inner = draft.starts % columns > 0
        for predicted, distance in zip(logits.chunk(2, -1), (1, columns), strict=True):
            matches = draft.fresh[:, None] == (draft.starts - distance)[:, :, None]  # [B, L, k]
            if distance == 1:
                matches &= inner[:, :, None]
            has = matches.any(-1)
            found = pick(predicted, matches.long().argmax(-1).repeat(copies, 1))
            total = total + found.where(has.repeat(copies, 1)[..., None], 0.0)
            count = count + has
        return total / count.repeat(copies, 1)[..., None]
