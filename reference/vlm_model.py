"""The reference vision-language models: their shapes, vision towers and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from mmspec.scenes.reader import label_heads
from mmspec.scenes.world import CANVAS
from reference.processors import MAX_LENGTH
from reference.vlm_data import IGNORED, MENTION_CLASSES, PATCH_CLASSES, ConversationBatch, PatchBatch

__all__ = [
    "ConversationLoss",
    "HybridVLM",
    "MENTION_WEIGHT",
    "ModelShape",
    "PatchLoss",
    "ReferenceVLM",
    "SHAPES_BY_SIZE",
    "VisionTower",
    "build_model",
    "exact_answers",
    "label_loss",
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
    """The vision tower of a reference model, and the sizes that its training data depend on.

    Attributes:
        module: the tower.
        name: text that the names of its parameters in the model contain.
        width: width of its states.
        patch: side of a patch in pixels.
        image_token: id of the placeholder of a visual token.
        visual_tokens: visual tokens per image of the reference size.
    """

    module: nn.Module
    name: str
    width: int
    patch: int
    image_token: int
    visual_tokens: int


def tower_of(vlm: ReferenceVLM, size: int) -> VisionTower:
    """Return the tower of a model, for images of `size` x `size` pixels."""
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
    """Return the parameters of a tower without its merger, which is trained with the decoder."""
    return [tensor for name, tensor in tower.named_parameters() if not name.startswith("merger.")]


def patch_states(tower: nn.Module, pixels: Tensor) -> Tensor:
    """Return the states [B, patches, d] of the patches of images [B, 3, size, size], in raster order."""
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
    states = tower(patches, sizes).last_hidden_state  # the input of the merger
    return rearrange(
        states,
        "(b rows columns i j) d -> b (rows i columns j) d",
        b=len(pixels),
        rows=grid // config.spatial_merge_size,
        i=config.spatial_merge_size,
        j=config.spatial_merge_size,
    )


def visual_tokens(vlm: ReferenceVLM, states: Tensor) -> Tensor:
    """Return the visual tokens [B * n, D] of the states of patches [B, patches, d] in raster order."""
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
    """Return position ids of conversations [B, L] with one image each; None for consecutive positions."""
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


MENTION_WEIGHT = 0.5
TOWER_HEAD_WIDTH = 32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and depths of one size of reference model.

    Attributes:
        head_width: width of the decoder's attention heads.
        hybrid: whether the model is a Qwen3.5, with a recurrent state in three of four layers, and not a
            LLaVA.
    """

    tower_width: int
    tower_layers: int
    decoder_width: int
    decoder_layers: int
    head_width: int = 32
    hybrid: bool = False


SHAPES_BY_SIZE = {
    "base": ModelShape(tower_width=128, tower_layers=4, decoder_width=192, decoder_layers=6),
    "small": ModelShape(tower_width=128, tower_layers=4, decoder_width=128, decoder_layers=2),
    "tiny": ModelShape(tower_width=32, tower_layers=1, decoder_width=32, decoder_layers=2),
    "large": ModelShape(tower_width=128, tower_layers=4, decoder_width=768, decoder_layers=16, head_width=64),
    "hybrid": ModelShape(tower_width=128, tower_layers=4, decoder_width=128, decoder_layers=4, hybrid=True),
    "tiny-hybrid": ModelShape(
        tower_width=32, tower_layers=1, decoder_width=32, decoder_layers=4, hybrid=True
    ),
}
"""Shapes of the reference model, its draft model, a model for tests, a model of 115 M parameters for GPUs,
and the hybrid models."""


def build_model(shape: ModelShape, processor: LlavaProcessor | Qwen3VLProcessor) -> ReferenceVLM:
    """Build a model with random weights for a processor."""
    tokenizer = processor.tokenizer
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model: ReferenceVLM
    if isinstance(processor, Qwen3VLProcessor):
        model = _hybrid(shape, processor, ids)
    else:
        model = _llava(shape, processor, ids)
    model.generation_config = GenerationConfig(max_new_tokens=320, do_sample=False, **ids)
    return model


def _llava(shape: ModelShape, processor: LlavaProcessor, ids: dict[str, Any]) -> ReferenceVLM:
    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=shape.tower_width,
        intermediate_size=4 * shape.tower_width,
        num_hidden_layers=shape.tower_layers,
        num_attention_heads=shape.tower_width // TOWER_HEAD_WIDTH,
        image_size=CANVAS,
        patch_size=processor.patch_size,
        projection_dim=shape.tower_width,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.decoder_width,
        intermediate_size=-(-shape.decoder_width * 8 // 3 // 64) * 64,
        num_hidden_layers=shape.decoder_layers,
        num_attention_heads=shape.decoder_width // shape.head_width,
        num_key_value_heads=shape.decoder_width // shape.head_width,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        **ids,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=processor.image_token_id,
        image_seq_length=(CANVAS // processor.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        **ids,
    )
    return LlavaForConditionalGeneration(config)


def _hybrid(shape: ModelShape, processor: Qwen3VLProcessor, ids: dict[str, Any]) -> ReferenceVLM:
    images, width, head = processor.image_processor, shape.decoder_width, shape.head_width
    vision: dict[str, Any] = dict(
        depth=shape.tower_layers,
        hidden_size=shape.tower_width,
        intermediate_size=3 * shape.tower_width,
        num_heads=max(1, shape.tower_width // TOWER_HEAD_WIDTH),
        patch_size=images.patch_size,
        temporal_patch_size=images.temporal_patch_size,
        spatial_merge_size=images.merge_size,
        out_hidden_size=width,
        num_position_embeddings=(CANVAS // images.patch_size) ** 2,
    )
    heads = max(1, width // head)
    text: dict[str, Any] = dict(
        vocab_size=len(processor.tokenizer),
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=shape.decoder_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        max_position_embeddings=MAX_LENGTH,
        # half of the 32 dimensions are rotated: 8 frequencies for time, height and width
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
        **ids,
    )
    config = Qwen3_5Config(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=processor.vision_start_token_id,
        vision_end_token_id=processor.vision_end_token_id,
        tie_word_embeddings=False,
        **ids,
    )
    return HybridVLM(config)


class PatchLoss(nn.Module):
    """Mean cross entropy of the dense labels. One linear layer per label reads the states of the tower."""

    def __init__(self, tower: nn.Module, width: int, heads: nn.ModuleDict | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.heads = heads or label_heads(width, PATCH_CLASSES)

    def forward(self, batch: PatchBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, and the accuracy of each label over patches of objects (`background`: all)."""
        states = patch_states(self.tower, batch.pixels)
        loss = states.new_zeros((), dtype=torch.float32)
        accuracies = {}
        covered = batch.labels[..., 0] > 0
        for index, name in enumerate(PATCH_CLASSES):
            head = self.heads[name]
            logits, labels = head(states).float(), batch.labels[..., index]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / len(self.heads)
            right = logits.argmax(-1) == labels
            accuracies[name] = (right if name == "background" else right[covered]).float().mean()
        return loss, accuracies


class ConversationLoss(nn.Module):
    """Weighted cross entropy of the answers in packed conversations, and of the labels of mentions.

    One linear layer per label reads the states of mentions in the middle layer of the decoder, so that later
    layers can use the result.

    The forward pass repeats that of the model's class, but computes logits only at learnt tokens, and no
    gradients of a frozen tower.
    """

    def __init__(self, vlm: ReferenceVLM, *, frozen_tower: bool = False) -> None:
        super().__init__()
        self.vlm = vlm
        self.tower = tower_of(vlm, CANVAS)
        self.frozen_tower = frozen_tower
        text: Any = vlm.config.text_config
        self.middle = text.num_hidden_layers // 2
        self.mention_heads = label_heads(text.hidden_size, MENTION_CLASSES)
        for parameter in tower_parameters(self.tower.module):
            parameter.requires_grad_(not frozen_tower)

    def forward(self, batch: ConversationBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and whether each learnt token is the greedy choice: bool `[learnt]`."""
        model = self.vlm.model
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_tower):
            states = patch_states(self.tower.module, batch.pixels)
        visual = visual_tokens(self.vlm, states)
        embedded = model.language_model.embed_tokens(batch.tokens)
        places = (batch.tokens == self.tower.image_token)[..., None]
        embedded = embedded.masked_scatter(places, visual.to(embedded.dtype))
        decoded = model.language_model(
            inputs_embeds=embedded,
            position_ids=positions(self.vlm, batch.tokens, CANVAS),
            use_cache=False,
            output_hidden_states=True,
        )
        weights, labels = batch.weights[:, 1:], batch.tokens[:, 1:]
        learnt = weights > 0
        logits = self.vlm.lm_head(decoded.last_hidden_state[:, :-1][learnt]).float()
        losses = F.cross_entropy(logits, labels[learnt], reduction="none")
        loss = (losses * weights[learnt]).sum() / weights.sum()
        mentions = decoded.hidden_states[self.middle][batch.mention_at.unbind(-1)]
        mention_loss, _ = label_loss(mentions, batch.mention_labels, self.mention_heads)
        loss = loss + MENTION_WEIGHT * mention_loss
        return loss, logits.argmax(-1) == labels[learnt]


def label_loss(
    states: torch.Tensor, labels: torch.Tensor, heads: nn.ModuleDict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean cross entropy and accuracy of the labels [..., heads] that are not `IGNORED`."""
    loss, right = states.new_zeros((), dtype=torch.float32), []
    for index, head in enumerate(heads.values()):
        logits, wanted = head(states).float(), labels[..., index]
        known = wanted != IGNORED
        losses = F.cross_entropy(
            logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss + losses / known.sum().clamp(min=1) / len(heads)
        right.append((logits.argmax(-1) == wanted)[known])
    return loss, torch.cat(right).float().mean()


def exact_answers(batch: ConversationBatch, right: torch.Tensor) -> torch.Tensor:
    """Return which answers greedy decoding gives without an error: bool `[turns]`."""
    turns = batch.turns[:, 1:][batch.weights[:, 1:] > 0]
    exact = torch.ones(len(batch.kinds), dtype=torch.bool, device=right.device)
    exact[turns[~right]] = False
    return exact
