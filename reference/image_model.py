"""The reference image models: their shapes and their loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.scenes.reader import label_heads
from mmspec.training.data.scenes import CAPTION_LENGTH
from reference.image_data import CAPTION_CLASSES, CLASSES, GRID, ImageBatch
from reference.processors import build_tokenizer
from reference.vlm_data import IGNORED, PATCH_CLASSES
from reference.vlm_model import label_loss

__all__ = [
    "BESIDE_OBJECT",
    "SHAPES_BY_SIZE",
    "ImageLoss",
    "ImageModelShape",
    "beside_objects",
    "build_caption_tokenizer",
    "build_text_encoder",
    "build_transformer",
    "caption_vectors",
    "place_loss",
]

PLACE_WEIGHT = 1.0
CAPTION_WEIGHT = 1.0
ONE_WAY = 4.0
BESIDE_OBJECT = 4.0


@dataclass(frozen=True, slots=True)
class ImageModelShape:
    """Widths and depths of one size of reference model.

    Attributes:
        entries: entries of the codebook.
        grid: tokens per side.
    """

    width: int
    layers: int
    heads: int
    text_width: int
    text_layers: int
    entries: int
    grid: int = GRID


SHAPES_BY_SIZE = {
    "base": ImageModelShape(width=192, layers=8, heads=6, text_width=128, text_layers=2, entries=1024),
    "long": ImageModelShape(
        width=128, layers=8, heads=4, text_width=128, text_layers=2, entries=1024, grid=2 * GRID
    ),
    "tiny": ImageModelShape(width=32, layers=2, heads=2, text_width=32, text_layers=1, entries=64),
}
"""The reference model, a narrower model with four times as many image tokens, and a model for tests."""


def build_transformer(shape: ImageModelShape, condition: str) -> LlamaGenForCausalLM:
    """Build a LlamaGen with random weights, for `condition` "caption" or "class"."""
    config = LlamaGenConfig(
        vocab_size=shape.entries,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        grid_size=shape.grid,
        condition_type=condition,
        num_classes=CLASSES,
        caption_length=CAPTION_LENGTH,
        caption_dim=shape.text_width,
    )
    model = LlamaGenForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, guidance_scale=4.0, max_new_tokens=shape.grid**2
    )
    return model


def build_caption_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word, which truncates prompts to `CAPTION_LENGTH` tokens."""
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = CAPTION_LENGTH
    return tokenizer


def build_text_encoder(shape: ImageModelShape, tokenizer: PreTrainedTokenizerFast) -> T5EncoderModel:
    """Build a small T5 encoder with random weights, except for its position biases."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=shape.text_width,
        d_kv=32,
        d_ff=4 * shape.text_width,
        num_layers=shape.text_layers,
        num_heads=shape.text_width // 32,
        relative_attention_max_distance=CAPTION_LENGTH,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        is_encoder_decoder=False,
        use_cache=False,
    )
    encoder = T5EncoderModel(config)
    _look_both_ways(encoder)
    return encoder


@torch.no_grad()
def _look_both_ways(encoder: T5EncoderModel) -> None:
    """Initialise half of the heads to attend to earlier words, and half to later words.

    Words before "left of" describe another object than words after it. Position biases grow by at most the
    learning rate per step, so learning this from values near zero takes thousands of steps.
    """
    stack: Any = encoder.encoder
    attention = stack.block[0].layer[0].SelfAttention
    bias = attention.relative_attention_bias.weight  # [buckets, heads]; the second half is for later words
    buckets, heads = bias.shape
    bias[buckets // 2 :, : heads // 2] -= ONE_WAY
    bias[: buckets // 2, heads // 2 :] -= ONE_WAY


class ImageLoss(nn.Module):
    """Cross entropy of the image tokens, and two auxiliary losses that teach the binding of words to places.

    Tokens next to earlier tokens of an object have a larger weight, because background is most of an image
    and hardest to predict. The weight depends on earlier tokens only, so that it biases no distribution.

    One linear layer per label reads the labels of the auxiliary losses:

    - from the state in the middle layer, the object that covers the next token's place, and its attributes;
    - from the mean of the caption's slots, the attributes that the caption names. Image tokens see no more
      of the slots than their mean (`raster_rotation`).

    Args:
        transformer: a LlamaGen, conditioned on captions or on classes.
        text_encoder: the text encoder of a model of captions; None for a model of classes.
    """

    def __init__(self, transformer: LlamaGenForCausalLM, text_encoder: T5EncoderModel | None) -> None:
        super().__init__()
        config = transformer.config
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.middle = config.num_hidden_layers // 2
        self.place_heads = label_heads(config.hidden_size, PATCH_CLASSES)
        if text_encoder is not None:
            # Official files have a frozen text encoder and a buffer instead; `write_null_embedding` fills it.
            self.null_embedding = nn.Parameter(0.02 * torch.randn(CAPTION_LENGTH, config.caption_dim))
            self.caption_heads = label_heads(config.hidden_size, CAPTION_CLASSES)

    def forward(self, batch: ImageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: nats per token, and the accuracy of both auxiliary losses."""
        tokens = batch.tokens
        if self.text_encoder is not None:
            vectors, mask, caption_loss, asked = self._read_captions(batch)
        else:
            labels = torch.where(batch.dropped[: len(tokens)], CLASSES, batch.class_labels)
            vectors = self.transformer.model.cls_embedding.embedding_table(labels)[:, None]
            mask = torch.ones_like(labels)[:, None]
            caption_loss = asked = vectors.new_zeros(())
        slots = vectors.shape[1]
        embedded = torch.cat([vectors, self.transformer.model.embed_tokens(tokens[:, :-1])], dim=1)
        seen = torch.cat([mask, mask.new_ones(len(tokens), tokens.shape[1] - 1)], dim=1)
        decoded = self.transformer.model(
            inputs_embeds=embedded, attention_mask=seen, use_cache=False, output_hidden_states=True
        )
        logits = self.transformer.lm_head(decoded.last_hidden_state[:, slots - 1 :]).float()
        losses = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
        weights = 1 + (BESIDE_OBJECT - 1) * beside_objects(batch.place_labels[..., 0] > 0)
        places, placed = place_loss(
            decoded.hidden_states[self.middle][:, slots - 1 :], batch, self.place_heads
        )
        loss = (losses * weights).sum() / weights.sum()
        loss = loss + PLACE_WEIGHT * places + CAPTION_WEIGHT * caption_loss
        figures = {"nats": losses.mean(), "places": placed}
        return loss, figures if self.text_encoder is None else figures | {"asked": asked}

    @torch.no_grad()
    def write_null_embedding(self) -> None:
        """Copy the learned features of an empty caption to the buffer that `null_caption_prompt` reads."""
        if self.text_encoder is not None:
            self.transformer.model.cls_embedding.uncond_embedding.copy_(self.null_embedding)

    def _read_captions(self, batch: ImageBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        encoder: Any = self.text_encoder
        features = encoder(input_ids=batch.words, attention_mask=batch.word_mask).last_hidden_state
        features = torch.where(batch.dropped[:, None, None], self.null_embedding, features)
        vectors = self.transformer.model.cls_embedding.cap_proj(features)
        weights = batch.word_mask[..., None].to(vectors.dtype)
        pooled = (vectors * weights).sum(1) / weights.sum(1)
        labels = batch.caption_labels.masked_fill(batch.dropped[:, None], IGNORED)
        loss, right = label_loss(pooled, labels, self.caption_heads)
        images = len(batch.tokens)
        return vectors[:images], batch.word_mask[:images], loss, right


def caption_vectors(decoder: Any, text_encoder: Any, batch: ImageBatch) -> Tensor:
    """Return the condition slots [B, n, D] of a batch's captions, with a frozen text encoder."""
    with torch.no_grad():
        features = text_encoder(input_ids=batch.words, attention_mask=batch.word_mask).last_hidden_state
        null = decoder.cls_embedding.uncond_embedding
        features = torch.where(batch.dropped[:, None, None], null, features)
    vectors: Tensor = decoder.cls_embedding.cap_proj(features)
    return vectors


def place_loss(states: Tensor, batch: ImageBatch, heads: nn.ModuleDict) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy of the labels of each place, read from the states before it [B, cells, d].

    Only the caption predicts where an object begins, so the places where objects begin count twice.
    """
    covered = batch.place_labels[..., 0] > 0
    begins = covered & ~beside_objects(covered).bool()
    everywhere = torch.tensor([name in ("rank", "background") for name in PATCH_CLASSES])
    told = everywhere.to(covered.device) | covered[..., None]
    labels = batch.place_labels.masked_fill(~told, IGNORED)
    loss, right = label_loss(states, labels, heads)
    if bool(begins.any()):
        first, _ = label_loss(states[begins], labels[begins], heads)
        loss = (loss + first) / 2
    return loss, right


def beside_objects(covered: Tensor) -> Tensor:
    """Mark the cells with an object to their left or above them: [B, cells] bool -> 0 or 1 [B, cells]."""
    side = math.isqrt(covered.shape[1])
    grid = F.pad(covered.unflatten(1, (side, side)).float(), (1, 1, 1, 0))
    left, above = grid[:, 1:, :-2], grid[:, :-1, 1:-1]
    corners = torch.maximum(grid[:, :-1, :-2], grid[:, :-1, 2:])
    return torch.stack([left, above, corners]).amax(0).flatten(1)
