"""Target of PAR (2412.15119): a forward pass reads and predicts one token of every region of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import PromptOutput
from mmspec.families.par.modeling import PARForCausalLM
from mmspec.families.parallel_images.target import CellGroup, ParallelImageTarget
from mmspec.targets.causal import AnyState
from mmspec.targets.image_tokens import AnyVQ

__all__ = ["PARTarget"]

# Guidance scales of github.com/YuqingWang1029/PAR, README.md, by layers, width and regions; sizes as in
# autoregressive/models/gpt.py.
PAR = {
    (36, 1280, 4): 1.5,  # PAR-XL-4x
    (48, 1536, 4): 1.435,  # PAR-XXL-4x
    (24, 3200, 4): 1.345,  # PAR-3B-4x
    (24, 3200, 16): 1.5,  # PAR-3B-16x
}
OTHER_PAR = 1.5


class PARTarget(ParallelImageTarget):
    """Adapter from a model that decodes the regions of an image in parallel (PAR, 2412.15119).

    The first cells of the n regions are decoded one after another. The last of them and n - 1 special tokens,
    whose keys stay cached, predict the second cell of every region. From then on the token in region r
    predicts the next token of region r.
    """

    model: PARForCausalLM

    def __init__(self, model: PARForCausalLM, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        config, self.group_size = model.config, model.config.group_size
        shape = config.num_hidden_layers, config.hidden_size, self.group_size
        self.published = {"guidance_scale": PAR.get(shape, OTHER_PAR), "top_k": 0}
        self.plain = {"order": "regions", "regions": self.group_size}

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[AnyState, PromptOutput]:
        """Prefill the prompts; see `CausalTarget`."""
        state, output = super().prefill(prompts, capacity, taps)
        return replace(state, queries=self.model.model.special_tokens.weight), output

    def nodes(self, draft: CellGroup) -> Nodes:
        special = self.group_size - 1
        fresh = self.read_fresh(draft, extent=special)
        begins = draft.begin == self.group_size
        fresh.visible[:, :, fresh.extent - special :] = draft.begin >= self.group_size
        if not begins:
            return fresh
        # their positions are beyond the image and have no rotation, as in the published model
        more = torch.arange(special, device=fresh.slots.device).expand(len(fresh.slots), -1)
        tokens = torch.cat([fresh.tokens, self.vocabulary + more], 1)
        slots = torch.cat([fresh.slots, fresh.extent - special + more], 1)
        return Nodes(tokens, slots, fresh.depths, fresh.visible, fresh.deepest)
