"""NAR (2503.10696): LlamaGen's transformer, with two output matrices for two neighbours of each cell."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM, LlamaGenModel

__all__ = ["NARConfig", "NARForCausalLM", "NARModel"]


@strict
class NARConfig(LlamaGenConfig):
    """Config of a model that predicts the cells to the right of and below each cell (NAR, 2503.10696).

    Attributes:
        below_layers: number of last layers, of `num_hidden_layers`, for the prediction below alone.
    """

    model_type = "nar"

    below_layers: int = 1


class NARModel(LlamaGenModel):
    """LlamaGen's transformer, whose last layers are for the prediction below alone."""

    config: NARConfig
    config_class = NARConfig

    def __init__(self, config: NARConfig) -> None:
        super().__init__(config)
        self.below_norm = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def run(self, hidden_states: Tensor, **how: object) -> Tensor:
        """Run the layers: [B, T, D] -> [B, T, 2 D] normed states for the cells to the right and below."""
        shared = len(self.layers) - self.config.below_layers
        for layer in self.layers[:shared]:
            hidden_states = layer(hidden_states, **how)
        right = self.norm(hidden_states)
        for layer in self.layers[shared:]:
            hidden_states = layer(hidden_states, **how)
        return torch.cat([right, self.below_norm(hidden_states)], -1)


class NeighbourHeads(nn.Module):
    """Output matrices: states [..., 2 D] -> logits [..., 2 V] of the cell to the right, then that below."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.right = nn.Linear(width, vocabulary, bias=False)
        self.below = nn.Linear(width, vocabulary, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        right, below = states.chunk(2, -1)
        return torch.cat([self.right(right), self.below(below)], -1)


class NARForCausalLM(LlamaGenForCausalLM):
    """NAR: logits [B, T, 2 V] of the cells to the right of and below each cell."""

    config: NARConfig
    config_class = NARConfig
    decoder_class = NARModel

    def __init__(self, config: NARConfig) -> None:
        super().__init__(config)
        self.lm_head = NeighbourHeads(config.hidden_size, config.vocab_size)
        self.post_init()
