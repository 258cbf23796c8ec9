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
)

from mmspec.reference.attribute_reader import label_heads
from mmspec.reference.scenes.world import CANVAS
from mmspec.reference.training.vlm_data import PATCH_CLASSES, ConversationBatch, PatchBatch
from mmspec.reference.training.vlm_mentions import IGNORED, MENTION_CLASSES
from mmspec.reference.training.vlm_processor import MAX_LENGTH

__all__ = ["SHAPES_BY_SIZE", "ConversationLoss", "ModelShape", "PatchLoss", "build_model", "exact_answers"]

MENTION_WEIGHT = 0.5
TOWER_HEAD_WIDTH = 32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and depths of one size of reference model; `head_width` is that of the decoder."""

    tower_width: int
    tower_layers: int
    decoder_width: int
    decoder_layers: int
    head_width: int = 32


SHAPES_BY_SIZE = {
    "base": ModelShape(tower_width=128, tower_layers=4, decoder_width=192, decoder_layers=6),
    "small": ModelShape(tower_width=128, tower_layers=4, decoder_width=128, decoder_layers=2),
    "tiny": ModelShape(tower_width=32, tower_layers=1, decoder_width=32, decoder_layers=2),
    "large": ModelShape(tower_width=128, tower_layers=4, decoder_width=768, decoder_layers=16, head_width=64),
}
"""The reference model, its draft, one for tests, and one of 115 M parameters for GPUs."""


def build_model(shape: ModelShape, processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    """A LLaVA with random weights that fits the processor."""
    tokenizer = processor.tokenizer
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
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
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(max_new_tokens=320, do_sample=False, **ids)
    return model


class PatchLoss(nn.Module):
    """Mean cross entropy of the dense labels, read from the tower by one linear layer each."""

    def __init__(self, tower: nn.Module, width: int, heads: nn.ModuleDict | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.heads = heads or label_heads(width, PATCH_CLASSES)

    def forward(self, batch: PatchBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and each label's accuracy over the patches on objects (background: over all)."""
        states = self.tower(batch.pixels).last_hidden_state[:, 1:]
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

    The forward pass is that of `LlavaForConditionalGeneration`, spelt out so that logits are computed only
    where something is learnt, and so that a frozen tower costs no backward pass.
    """

    def __init__(self, vlm: LlavaForConditionalGeneration, *, frozen_tower: bool = False) -> None:
        super().__init__()
        self.vlm = vlm
        self.frozen_tower = frozen_tower
        text: Any = vlm.config.text_config
        self.middle = text.num_hidden_layers // 2
        self.mention_heads = label_heads(text.hidden_size, MENTION_CLASSES)
        vlm.model.vision_tower.requires_grad_(not frozen_tower)

    def forward(self, batch: ConversationBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and whether each learnt token would have been the greedy choice: bool `[learnt]`."""
        model = self.vlm.model
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_tower):
            states = model.vision_tower(batch.pixels).last_hidden_state[:, 1:]
        visual = model.multi_modal_projector(states)
        embedded = model.language_model.embed_tokens(batch.tokens)
        places = (batch.tokens == self.vlm.config.image_token_index)[..., None]
        embedded = embedded.masked_scatter(places, visual.to(embedded.dtype))
        decoded = model.language_model(inputs_embeds=embedded, use_cache=False, output_hidden_states=True)
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
