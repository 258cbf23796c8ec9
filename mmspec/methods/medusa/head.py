"""Medusa's heads: a few residual blocks each, on the target's last hidden state.

They have no embedding, and by default use the frozen output matrix of the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from mmspec.heads.configuration import LevelHeadsConfig
from mmspec.heads.layers import new_blocks
from mmspec.heads.model import DraftingHead

__all__ = ["MedusaConfig", "MedusaHead"]


@strict
class MedusaConfig(LevelHeadsConfig):
    """Config of Medusa's heads.

    Attributes:
        num_layers: residual blocks of each head. Without `own_lm_heads`, a linear map [d, d] follows them,
            before the target's output matrix.
    """

    model_type = "mmspec_medusa"


class MedusaHead(DraftingHead):
    """Predicts a hidden state for each token after the root (Medusa, 2401.10774, section 3.1).

    Head i reads the target's final hidden state at t and predicts token t + 2 + i; token t + 1, the root, is
    the target's own. Where heads share the target's output matrix, each has a linear map in front of it.
    x + SiLU(W x) can add to a state but hardly subtract from it, so that without a map, or with one that
    begins as the identity, heads keep predicting the root for long.
    """

    config: MedusaConfig
    config_class = MedusaConfig
    base_model_prefix = "medusa"
    main_input_name = "hidden"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, range(config.num_heads)
        self.blocks = nn.ModuleList(new_blocks(width, config.num_layers) for _ in heads)
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in (() if config.own_lm_heads else heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.vocabulary, bias=False) for _ in (heads if config.own_lm_heads else ())
        )
        self.post_init()

    def forward(self, hidden: Tensor, heads: int) -> Tensor:
        """Predict with the first `heads` heads: hidden states [..., d] -> [..., heads, d]."""
        states = [blocks(hidden) for blocks in self.blocks[:heads]]
        if self.maps:
            states = [self.maps[head](state) for head, state in enumerate(states)]
        return torch.stack(states, -2)

    def logits(self, predicted: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., heads, V or V'] of the first heads' states [..., heads, d]."""
        if not self.lm_heads:
            return read_out(predicted)
        states = enumerate(predicted.unbind(-2))
        return torch.stack([self.lm_heads[head](state) for head, state in states], -2)
