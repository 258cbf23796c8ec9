"""Vision towers of the reference models in training: CLIP of a LLaVA, or that of a Qwen3.5.

What the two losses need of either: states of patches in raster order, the visual tokens made of them, and the
positions of a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

__all__ = [
    "HybridVLM",
    "ReferenceVLM",
    "VisionTower",
    "patch_states",
    "positions",
    "tower_of",
    "tower_parameters",
    "visual_tokens",
]

HybridVLM = Qwen3_5ForConditionalGeneration
ReferenceVLM = LlavaForConditionalGeneration | HybridVLM


@dataclass(frozen=True, slots=True)
class VisionTower:
    """The vision tower of a reference model, and the sizes that data are made to.

    Attributes:
        module: reads images.
        name: of its parameters, in the model's.
        width: of its states.
        patch: side of a patch in pixels.
        image_token: id of a visual token's placeholder.
        visual_tokens: of an image of the reference size.
    """

    module: nn.Module
    name: str
    width: int
    patch: int
    image_token: int
    visual_tokens: int


def tower_of(vlm: ReferenceVLM, size: int) -> VisionTower:
    """Describe the tower of a model for square images of `size` pixels."""
    vision: Any = vlm.config.vision_config
    patches = (size // vision.patch_size) ** 2
    if isinstance(vlm, HybridVLM):
        merged = patches // vision.spatial_merge_size**2
        return VisionTower(
            vlm.model.visual,
            "visual.blocks",
            vision.hidden_size,
            vision.patch_size,
            vlm.config.image_token_id,
            merged,
        )
    tower, token = vlm.model.vision_tower, vlm.config.image_token_index
    return VisionTower(tower, "vision_tower", vision.hidden_size, vision.patch_size, token, patches)


def tower_parameters(tower: nn.Module) -> list[nn.Parameter]:
    """Parameters that make the states of patches; a merger behind them is the decoder's."""
    return [tensor for name, tensor in tower.named_parameters() if not name.startswith("merger.")]


def patch_states(tower: nn.Module, pixels: Tensor) -> Tensor:
    """States [B, patches, d] of the patches of images [B, 3, size, size], in raster order."""
    if not isinstance(tower, Qwen3_5VisionModel):
        states: Tensor = tower(pixels).last_hidden_state[:, 1:]
        return states
    config: Any = tower.config
    grid = pixels.shape[-1] // config.patch_size
    patches = repeat(
        pixels,
        "b c (rows i y) (columns j x) -> (b rows columns i j) (c t y x)",
        i=config.spatial_merge_size,
        j=config.spatial_merge_size,
        y=config.patch_size,
        x=config.patch_size,
        t=config.temporal_patch_size,
    )
    sizes = torch.tensor([[1, grid, grid]] * len(pixels), device=pixels.device)
    # the merger is left out: its input is read
    states = tower(patches, sizes).last_hidden_state
    return in_raster_order(states, len(pixels), config.spatial_merge_size)


def in_raster_order(states: Tensor, images: int, merge: int) -> Tensor:
    """States of square images block by block [B * patches, d] -> row by row [B, patches, d]."""
    blocks = int((len(states) // images) ** 0.5) // merge
    return rearrange(
        states,
        "(b rows columns i j) d -> b (rows i columns j) d",
        b=images,
        rows=blocks,
        columns=blocks,
        i=merge,
        j=merge,
    )


def visual_tokens(vlm: ReferenceVLM, states: Tensor) -> Tensor:
    """Visual tokens [B * n, D] of patches' states [B, patches, d] in raster order."""
    if not isinstance(vlm, HybridVLM):
        projected: Tensor = vlm.model.multi_modal_projector(states)
        return projected.flatten(0, 1)
    vision: Any = vlm.config.vision_config
    merge = vision.spatial_merge_size
    blocks = int(states.shape[1] ** 0.5) // merge
    merged: Tensor = vlm.model.visual.merger(
        rearrange(
            states,
            "b (rows i columns j) d -> (b rows columns i j) d",
            rows=blocks,
            columns=blocks,
            i=merge,
            j=merge,
        )
    )
    return merged


def positions(vlm: ReferenceVLM, tokens: Tensor, size: int) -> Tensor | None:
    """Position ids of conversations [B, L] with one image each; None where they are counted."""
    if not isinstance(vlm, HybridVLM):
        return None
    vision: Any = vlm.config.vision_config
    grid = size // vision.patch_size
    found, _ = vlm.model.get_rope_index(
        tokens,
        mm_token_type_ids=(tokens == vlm.config.image_token_id).long(),
        image_grid_thw=torch.tensor([[1, grid, grid]] * len(tokens), device=tokens.device),
    )
    ids: Tensor = found
    return ids
