"""LPD (2507.01957): LlamaGen's transformer, asked for any cells by queries.

A query is a learned mask token, and the position of a cell. Which cells a forward decides is not known here.
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
    """The shape of a model whose cells are asked for by learned queries (LPD, 2507.01957).

    Attributes:
        body: "llamagen", or "vit" for that of the published checkpoints: layer norms, biases, a GELU between
            two layers, and no rotation.
        generation_steps: forwards of an image in plain decoding; None is the published number for its size.
        repulsion_threshold: largest distance of cells, the larger one of rows and columns, that are not
            decided together in plain decoding; None is the published one of a checkpoint of this shape,
            or 2.
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
        """Refuse an unknown body; called by `strict`."""
        if self.body not in BODIES:
            raise ValueError(f"body: got {self.body!r}; {' or '.join(map(repr, BODIES))}")


class LPDLayer(LlamaGenDecoderLayer):
    """Layer of the published LPD: that of a vision transformer."""

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
        mask_token: [1, D] what a query holds beside its position.
        position_embedding: of the condition slots and of the cells, added to whatever stands there.
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
        """Read tokens, or vectors such as queries, at `position_ids` [B, T].

        Raises:
            ValueError: no positions: what a cell is asked by cannot be told from its place in the sequence.
        """
        if position_ids is None:
            raise ValueError("position_ids are needed: cells come in any order")
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self.embed(input_ids, caption_features)
        # places of a draft that are beyond the image say nothing, and nothing is kept of them
        where = position_ids.clamp_max(self.config.max_position_embeddings - 1)
        placed = self.embedding_norm(inputs_embeds + self.position_embedding(where))
        read: BaseModelOutputWithPast = super().forward(
            inputs_embeds=placed, position_ids=position_ids, **kwargs
        )
        return read

    def rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        return super().rotation(position_ids) if self.config.body == "llamagen" else None


class LPDForCausalLM(LlamaGenForCausalLM):
    """LPD: the tokens of any cells, given a condition and the tokens of any others.

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
