"""NAR (2503.10696): LlamaGen's transformer, with two heads that predict two neighbours of each token."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM, LlamaGenModel

__all__ = ["NARConfig", "NARForCausalLM", "NARModel"]


@strict
class NARConfig(LlamaGenConfig):
    """The shape of a model that predicts the cells right of and below each (NAR, 2503.10696).

    Attributes:
        below_layers: last of the `num_hidden_layers`, which the prediction below goes through alone.
    """

    model_type = "nar"

    below_layers: int = 1


class NARModel(LlamaGenModel):
    """LlamaGen's transformer; its last layers are those of the prediction below alone."""

    config: NARConfig
    config_class = NARConfig

    def __init__(self, config: NARConfig) -> None:
        super().__init__(config)
        self.below_norm = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def run(self, hidden_states: Tensor, **how: object) -> Tensor:
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
