"""The reference vision-language models: their shapes, and the two losses that they are trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen3_5Config,
    Qwen3VLProcessor,
)

from mmspec.scenes.reader import label_heads
from mmspec.scenes.world import CANVAS
from reference.vlm_data import PATCH_CLASSES, ConversationBatch, PatchBatch
from reference.vlm_mentions import IGNORED, MENTION_CLASSES
from reference.vlm_processor import MAX_LENGTH
from reference.vlm_vision import (
    HybridVLM,
    ReferenceVLM,
    patch_states,
    positions,
    tower_of,
    tower_parameters,
    visual_tokens,
)

__all__ = ["SHAPES_BY_SIZE", "ConversationLoss", "ModelShape", "PatchLoss", "build_model", "exact_answers"]

MENTION_WEIGHT = 0.5
TOWER_HEAD_WIDTH = 32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and depths of one size of reference model.

    Attributes:
        head_width: of the decoder.
        hybrid: a Qwen3.5, three layers of four with a recurrent state, instead of a LLaVA.
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
"""The reference model, its draft, one for tests, one of 115 M parameters for GPUs, and the hybrid ones."""


def build_model(shape: ModelShape, processor: LlavaProcessor | Qwen3VLProcessor) -> ReferenceVLM:
    """A model with random weights that fits the processor."""
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
        # of 32 dims, half of which turn: 8 frequencies for time, height and width
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
    """Mean cross entropy of the dense labels, read from the tower by one linear layer each."""

    def __init__(self, tower: nn.Module, width: int, heads: nn.ModuleDict | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.heads = heads or label_heads(width, PATCH_CLASSES)

    def forward(self, batch: PatchBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and each label's accuracy over the patches on objects (background: over all)."""
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
    """Weighted cross entropy of the answers in packed conversations, and of what mentions of objects mean.

    Mentions are read half-way up the decoder by one linear layer for each label, so that the layers above can
    use what has been found.

    The forward pass is that of the model's class, spelt out so that logits are computed only where something
    is learnt, and so that a frozen tower costs no backward pass.
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
        """The loss, and whether each learnt token would have been the greedy choice: bool `[learnt]`."""
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
    """Mean cross entropy and accuracy of labels [..., heads] that are not `IGNORED`."""
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
    """Mark the answers that greedy decoding would get entirely right: bool `[turns]`."""
    turns = batch.turns[:, 1:][batch.weights[:, 1:] > 0]
    exact = torch.ones(len(batch.kinds), dtype=torch.bool, device=right.device)
    exact[turns[~right]] = False
    return exact
