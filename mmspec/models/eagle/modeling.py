"""The EAGLE head with the seams of any transformers decoder: Cache, 4-D mask, position_ids.

It has no embedding and no output matrix: those are its target's, frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Cache, Emu3TextConfig, PreTrainedModel
from transformers.models.emu3.modeling_emu3 import Emu3TextModel

from mmspec.errors import UnsupportedModelError
from mmspec.models.eagle.configuration import EagleConfig

__all__ = ["EagleHead"]

AutoModel.register(Emu3TextConfig, Emu3TextModel, exist_ok=True)  # transformers leaves this one out


class EagleHead(PreTrainedModel):
    """Foretells the hidden state of a token from the token and the hidden state before it.

    Row t of its input holds the embedding of token t and the target's final hidden state at t - 1; its
    output imitates the target's at t. The one layer is followed by no norm, because what is imitated has
    passed one; it keeps its norm in front, which EAGLE's release left out (vlm-drafting.md, section 3).
    """

    config: EagleConfig
    config_class = EagleConfig
    base_model_prefix = "eagle"
    main_input_name = "embeddings"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.decoder = single_layer(config)
        self.post_init()

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What enters the layer: embeddings [B, n, d] of tokens and hidden states [B, n, d] before them."""
        fused: Tensor = self.fc(torch.cat([embeddings, features], dim=-1))
        return fused

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Foretell hidden states.

        Args:
            embeddings: [B, n, d] of tokens, as they enter the target's first layer.
            features: [B, n, d] final hidden states, normed, one token before.
            position_ids: of the tokens, as the target counts them.
            attention_mask: as the target's layers take it; None is causal.
            past_key_values: keys and values of the rows before.

        Returns:
            [B, n, d] final hidden states of the tokens.
        """
        output = self.decoder(
            inputs_embeds=self.fuse(embeddings, features),
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
            **kwargs,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def single_layer(config: EagleConfig) -> PreTrainedModel:
    """A decoder of the target's family whose only weights are those of one layer.

    Raises:
        UnsupportedModelError: the family's decoder is not a stack of `layers`.
    """
    decoder: PreTrainedModel = AutoModel.from_config(config.layer_config())
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} keeps its layers where no EAGLE head can be cut"
        )
    for name, child in list(decoder.named_children()):
        if name != "layers" and any(True for _ in child.parameters()):
            setattr(decoder, name, nn.Identity())  # embeddings and last norm are the target's
    return decoder
