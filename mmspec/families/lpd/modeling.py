"""LPD (2507.01957): LlamaGen's transformer with queries that predict any cells.

A query is a learned mask token at the position of a cell. The draft chooses the cells of a forward pass.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenDecoderLayer, LlamaGenForCausalLM, LlamaGenModel

__all__ = ["LPDConfig", "LPDForCausalLM", "LPDModel"]

BODIES = ("llamagen", "vit")
VIT_EPS = 1e-6


@strict
class LPDConfig(LlamaGenConfig):
    """Config of a model with learned queries for cells (LPD, 2507.01957).

    Attributes:
        body: "llamagen", or "vit" for that of the published checkpoints: layer norms, biases, a GELU between
            two linear layers, and no rotation.
        generation_steps: forward passes per image in plain decoding; None for the published number of its
            size.
        repulsion_threshold: largest distance (the larger of rows and columns) at which plain decoding does
            not decide two cells together; None for the published one of a checkpoint of this size, or 2.
    """

    model_type = "lpd"

    body: str = "llamagen"
    generation_steps: int | None = None
    repulsion_threshold: int | None = None

    @property
    def attention_bias(self) -> bool:
        """Whether queries, keys, values and outputs of attention have biases."""
        return self.body == "vit"

    def validate_body(self) -> None:
        """Raise ValueError for an unknown body; called by `strict`."""
        if self.body not in BODIES:
            raise ValueError(f"body must be {' or '.join(map(repr, BODIES))}; got {self.body!r}")


class LPDLayer(LlamaGenDecoderLayer):
    """Layer of the published LPD, as in a vision transformer."""

    def __init__(self, config: LPDConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, inner = config.hidden_size, int(config.intermediate_size or 0)
        self.input_layernorm = nn.LayerNorm(width, eps=VIT_EPS)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=VIT_EPS)
        parts = OrderedDict(fc1=nn.Linear(width, inner), act=nn.GELU(), fc2=nn.Linear(inner, width))
        self.mlp = nn.Sequential(parts)


class LPDModel(LlamaGenModel):
    """LlamaGen's transformer, or a vision transformer, with an embedding of every position.

    Attributes:
        mask_token: [1, D] vector of a query, without its position.
        position_embedding: embedding of the condition slots and cells, added to tokens and queries.
    """

    config: LPDConfig
    config_class = LPDConfig

    def __init__(self, config: LPDConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.mask_token = nn.Parameter(torch.zeros(1, width))
        self.position_embedding = nn.Embedding(config.max_position_embeddings, width)
        self.embedding_norm: nn.Module = nn.Identity()
        if config.body == "vit":
            self.embedding_norm = nn.LayerNorm(width, eps=VIT_EPS)
            self.layers = nn.ModuleList(LPDLayer(config, index) for index in range(config.num_hidden_layers))
            self.norm = nn.LayerNorm(width, eps=VIT_EPS)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        caption_features: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Run the model on tokens, or vectors such as queries, at `position_ids` [B, T].

        Raises:
            ValueError: `position_ids` is None.
        """
        if position_ids is None:
            raise ValueError("position_ids must be passed, since cells may be in any order")
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self.embed(input_ids, caption_features)
        # places of a draft beyond the image are ignored and never committed
        where = position_ids.clamp_max(self.config.max_position_embeddings - 1)
        placed = self.embedding_norm(inputs_embeds + self.position_embedding(where))
        read: BaseModelOutputWithPast = super().forward(
            inputs_embeds=placed, position_ids=position_ids, **kwargs
        )
        return read

    def rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        return super().rotation(position_ids) if self.config.body == "llamagen" else None


class LPDForCausalLM(LlamaGenForCausalLM):
    """LPD: predicts the tokens of any cells, given a condition and the tokens of any others.

    Example:
        >>> config = LPDConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
        >>> model = LPDForCausalLM(config).eval()
        >>> query = model.model.mask_token[None]  # of the seventh cell, given nothing
        >>> model(inputs_embeds=query, position_ids=torch.tensor([[1 + 6]])).logits.shape
        torch.Size([1, 1, 64])
    """

    config: LPDConfig
    model: LPDModel
    config_class = LPDConfig
    decoder_class = LPDModel
