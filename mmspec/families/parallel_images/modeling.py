"""Transformers that predict many cells in a forward, each LlamaGen's with one addition.

LPD (2507.01957) asks for any cells by queries: a learned mask token, and the position of the cell. NAR
(2503.10696) predicts two neighbours of each token, by two heads. PAR (2412.15119) has learned special tokens
that begin the regions of an image. Which cells a forward decides is not known
here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from mmspec.families.llamagen.modeling import LlamaGenDecoderLayer, LlamaGenForCausalLM, LlamaGenModel
from mmspec.families.parallel_images.configuration import (
    LPDConfig,
    NARConfig,
    ParallelImageConfig,
    PARConfig,
)

VIT_EPS = 1e-6


class LPDLayer(LlamaGenDecoderLayer):
    """Layer of the published LPD: that of a vision transformer."""

    def __init__(self, config: LPDConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, inner = config.hidden_size, int(config.intermediate_size or 0)
        self.input_layernorm = nn.LayerNorm(width, eps=VIT_EPS)  # type: ignore[assignment]
        self.post_attention_layernorm = nn.LayerNorm(width, eps=VIT_EPS)  # type: ignore[assignment]
        parts = OrderedDict(fc1=nn.Linear(width, inner), act=nn.GELU(), fc2=nn.Linear(inner, width))
        self.mlp = nn.Sequential(parts)  # type: ignore[assignment]


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
            self.norm = nn.LayerNorm(width, eps=VIT_EPS)  # type: ignore[assignment]
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        caption_features: Tensor | None = None,
        **kwargs: Any,
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

    def rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.body == "llamagen":
            return super().rotation(position_ids)
        shape = *position_ids.shape, self.config.head_dim // 2
        still = torch.ones(shape, dtype=torch.float32, device=position_ids.device)
        return still, torch.zeros_like(still)


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
    config_class = LPDConfig
    decoder_class = LPDModel


class NARModel(LlamaGenModel):
    """LlamaGen's transformer; its last layers are those of the prediction below alone."""

    config: NARConfig
    config_class = NARConfig

    def __init__(self, config: NARConfig) -> None:
        super().__init__(config)
        self.below_norm = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def run(self, hidden_states: Tensor, **how: Any) -> Tensor:
        """Run the layers: [B, T, D] -> [B, T, 2 D] normed states for the cell right of and below each."""
        shared = len(self.layers) - self.config.below_layers
        for layer in self.layers[:shared]:
            hidden_states = layer(hidden_states, **how)
        right = self.norm(hidden_states)
        for layer in self.layers[shared:]:
            hidden_states = layer(hidden_states, **how)
        return torch.cat([right, self.below_norm(hidden_states)], -1)


class NeighbourHeads(nn.Module):
    """Two heads: states [..., 2 D] -> logits [..., 2 V] of the cell to the right, then of the one below."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.right = nn.Linear(width, vocabulary, bias=False)
        self.below = nn.Linear(width, vocabulary, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        right, below = states.chunk(2, -1)
        return torch.cat([self.right(right), self.below(below)], -1)


class NARForCausalLM(LlamaGenForCausalLM):
    """NAR: the tokens right of and below every token, as logits [B, T, 2 V]."""

    config: NARConfig
    config_class = NARConfig
    decoder_class = NARModel

    def __init__(self, config: NARConfig) -> None:
        super().__init__(config)
        self.lm_head = NeighbourHeads(config.hidden_size, config.vocab_size)
        self.post_init()


class PARModel(LlamaGenModel):
    """LlamaGen's transformer, with tokens that begin the regions of an image but the last."""

    config: PARConfig
    config_class: type[ParallelImageConfig] = PARConfig

    def __init__(self, config: PARConfig) -> None:
        super().__init__(config)
        self.special_tokens = nn.Embedding(config.group_size - 1, config.hidden_size)
        self.post_init()


class PARForCausalLM(LlamaGenForCausalLM):
    """PAR: the next token, and in groups the next token of every region."""

    config: PARConfig
    config_class = PARConfig
    decoder_class = PARModel
