"""Transformers that predict an image scale by scale (VAR, 2404.02905), built from the parts of LlamaGen.

The input of a place is not a token but the sum of the code vectors of all coarser scales, resized to its own
scale. The image tokenizer computes the sum (`tokenizer`). The input of the first scale is the class, which
also scales and shifts every layer. Places see all of their own scale and of the scales before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import accumulate
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import (
    ClassEmbedding,
    LlamaGenAttention,
    LlamaGenDecoderLayer,
    LlamaGenForCausalLM,
    LlamaGenModel,
)
from mmspec.transformers_versions import CACHE

LARGEST_SCALE = math.log(100)  # logarithm of the largest scale of a head's attention logits
FIRST_SCALE = math.log(4)  # logarithm of the initial scale
UNNORMALISED = 0.25  # factor of attention's usual scale, if queries and keys are not normalised
PARTS = 6  # vectors of a layer: two gates, two scales, two shifts


@strict
class VARConfig(LlamaGenConfig):
    """Config of a model that predicts one scale of an image per forward pass (VAR, 2404.02905).

    Attributes:
        patch_nums: tokens per side of each scale, from the coarsest to the image's own grid.
        latent_channels: width of the image tokenizer's code vectors, whose sums are the inputs.
        shared_modulation: whether the layers share the matrix that maps the class to their scales, shifts and
            gates, as in the published model of 36 layers.
        normalised_attention: whether queries and keys have length 1, and each head has a learned scale.
    """

    model_type = "var"

    attention_bias = True  # the bias of keys is 0 in published files
    layer_norm_eps = 1e-6

    patch_nums: list[int] | tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
    latent_channels: int = 32
    shared_modulation: bool = False
    normalised_attention: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        if self.patch_nums:
            self.grid_size = self.patch_nums[-1]
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_patch_nums(self) -> None:
        """Raise ValueError unless each scale is finer than the one before; called by `strict`."""
        sides = self.patch_nums
        if not sides or sides[0] < 1 or any(b <= a for a, b in zip(sides, sides[1:], strict=False)):
            raise ValueError(f"patch_nums must be positive integers in increasing order; got {sides}")

    @property
    def prefix_length(self) -> int:
        """No slots before the image: the class is the input of the first scale."""
        return 0

    @property
    def image_tokens(self) -> int:
        """Tokens of all scales of an image."""
        return sum(side**2 for side in self.patch_nums)


class Modulation(nn.Module):
    """Maps a class to scales, shifts and gates: vectors [B, D] -> [B, 1, parts, D]."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, parts * width)
        self.parts = parts

    def forward(self, condition: Tensor) -> Tensor:
        made: Tensor = self.linear(F.silu(condition)).unflatten(1, (1, self.parts, -1))
        return made


class VARAttention(LlamaGenAttention):
    """Attention without positions, with optional normalised queries and keys and a scale for each head."""

    def __init__(self, config: VARConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        self.log_scale: nn.Parameter | None = None
        if config.normalised_attention:
            self.scaling = 1.0
            self.log_scale = nn.Parameter(torch.full((config.num_attention_heads, 1, 1), FIRST_SCALE))
        else:
            self.scaling *= UNNORMALISED

    def place(
        self, queries: Tensor, keys: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if self.log_scale is None:
            return queries, keys
        precise = torch.promote_types(queries.dtype, torch.float32)
        scale = self.log_scale.to(precise).clamp_max(LARGEST_SCALE).exp()
        scaled = F.normalize(queries.to(precise), dim=-1) * scale
        return scaled.to(queries.dtype), F.normalize(keys.to(precise), dim=-1).to(keys.dtype)


class VARLayer(LlamaGenDecoderLayer):
    """x + gate * attention(scale * norm(x) + shift), then the same with the feed-forward network."""

    def __init__(self, config: VARConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, inner = config.hidden_size, int(config.intermediate_size or 0)
        self.self_attn = VARAttention(config, layer_idx)
        self.input_layernorm = plain_norm(config)
        self.post_attention_layernorm = plain_norm(config)
        parts = OrderedDict(fc1=nn.Linear(width, inner), act=nn.GELU("tanh"), fc2=nn.Linear(inner, width))
        self.mlp = nn.Sequential(parts)
        self.modulation: Modulation | None = None
        self.offsets: nn.Parameter | None = None  # of this layer, if layers share the modulation
        if config.shared_modulation:
            self.offsets = nn.Parameter(torch.zeros(PARTS, width))
        else:
            self.modulation = Modulation(width, PARTS)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer; `condition` is the class [B, D], or the shared modulation [B, 1, 6, D]."""
        condition: Tensor = kwargs.pop("condition")
        if self.modulation is not None:
            parts = self.modulation(condition)
        else:
            parts = condition if self.offsets is None else self.offsets + condition
        gate, inner_gate, scale, inner_scale, shift, inner_shift = parts.unbind(2)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states) * (1 + scale) + shift, **kwargs)
        hidden_states = hidden_states + gate * attended
        inner = self.post_attention_layernorm(hidden_states) * (1 + inner_scale) + inner_shift
        output: Tensor = hidden_states + inner_gate * self.mlp(inner)
        return output


class VARModel(LlamaGenModel):
    """The transformer without its output matrix.

    Attributes:
        embed_tokens: projection of vectors of the image tokenizer to those of the transformer.
        start: [n, D] vectors that are added to the class at the places of the first scale.
        position_embedding, level_embedding: embeddings of all places of all scales, and of the scales.
    """

    config: VARConfig
    config_class = VARConfig
    cls_embedding: ClassEmbedding

    def __init__(self, config: VARConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Linear(config.latent_channels, width)
        self.start = nn.Parameter(torch.zeros(config.patch_nums[0] ** 2, width))
        self.position_embedding = nn.Embedding(config.image_tokens, width)
        self.level_embedding = nn.Embedding(len(config.patch_nums), width)
        self.layers = nn.ModuleList(VARLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = plain_norm(config)
        self.head_modulation = Modulation(width, 2)
        self.shared_modulation = Modulation(width, PARTS) if config.shared_modulation else None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        caption_features: Tensor | None = None,
        class_labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Run the model on the sums of coarser scales at some places.

        Args:
            input_ids: must be None.
            position_ids: [B, T] places, counted through all scales; None for the first T.
            inputs_embeds: [B, T, c] vectors of the image tokenizer; those of the first scale are ignored.
            caption_features: ignored.
            class_labels: [B] classes; `num_classes` for no class.
            attention_mask: [B, 1, T, n]; None without a cache lets a place see its scale and those before.

        Raises:
            ValueError: vectors or labels are missing, or `input_ids` is not None.
        """
        if inputs_embeds is None or class_labels is None or input_ids is not None:
            raise ValueError("pass inputs_embeds and class_labels, and no input_ids")
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        where = position_ids.clamp_max(self.config.image_tokens - 1).expand(len(inputs_embeds), -1)
        condition: Tensor = self.cls_embedding.embedding_table(class_labels)
        first, level = len(self.start), self.level_of(where)
        begin = condition[:, None] + self.start[where.clamp_max(first - 1)]
        read = torch.where((where < first)[..., None], begin, self.embed_tokens(inputs_embeds))
        placed = read + self.position_embedding(where) + self.level_embedding(level)
        if attention_mask is None and kwargs.get(CACHE, kwargs.get("cache")) is None:
            future = level[:, None] > level[:, :, None]
            attention_mask = torch.zeros_like(future, dtype=placed.dtype)
            attention_mask.masked_fill_(future, torch.finfo(placed.dtype).min)
            attention_mask = attention_mask[:, None]
        output: BaseModelOutputWithPast = super().forward(
            inputs_embeds=placed,
            position_ids=position_ids,
            attention_mask=attention_mask,
            condition=condition,
            **kwargs,
        )
        return output

    def level_of(self, places: Tensor) -> Tensor:
        """Scale of each place."""
        ends = accumulate(side**2 for side in self.config.patch_nums[:-1])
        # computed from numbers on the host, since a table would have to be moved to the device
        return sum(((places >= end).long() for end in ends), torch.zeros_like(places))

    def rotation(self, position_ids: Tensor) -> None:
        return None

    def run(self, hidden_states: Tensor, **how: Any) -> Tensor:
        condition: Tensor = how.pop("condition")
        given = condition if self.shared_modulation is None else self.shared_modulation(condition)
        for layer in self.layers:
            hidden_states = layer(hidden_states, condition=given, **how)
        scale, shift = self.head_modulation(condition).unbind(2)
        normed: Tensor = self.norm(hidden_states) * (1 + scale) + shift
        return normed


class VARForCausalLM(LlamaGenForCausalLM):
    """VAR: predicts the tokens of a scale, given a class and the sum of all coarser scales.

    Example:
        >>> config = VARConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, patch_nums=(1, 2))
        >>> model = VARForCausalLM(config).eval()
        >>> features = torch.randn(1, 1 + 4, 32)  # the first row, for the first scale, is ignored
        >>> model(inputs_embeds=features, class_labels=torch.tensor([207])).logits.shape
        torch.Size([1, 5, 16384])
    """

    config: VARConfig
    config_class = VARConfig
    decoder_class = VARModel

    def __init__(self, config: VARConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()


def plain_norm(config: VARConfig) -> nn.LayerNorm:
    """A layer norm without weights; the modulation scales and shifts its output."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, elementwise_affine=False)
