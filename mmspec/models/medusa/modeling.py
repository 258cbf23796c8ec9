"""Medusa's heads: a few residual blocks each, on the target's last hidden state.

They have no embedding, and by default no output matrix: that is their target's, frozen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import initialization as init

from mmspec.models.feature_head import DraftingHead
from mmspec.models.medusa.configuration import MedusaConfig

__all__ = ["MedusaHead"]


class MedusaHead(DraftingHead):
    """Foretells the hidden states that say the tokens after the root (Medusa, 2401.10774, section 3.1).

    Head i reads the target's final hidden state at t and foretells token t + 2 + i; token t + 1, the root, is
    the target's own. New blocks change nothing, so every head begins with the target's own prediction.
    """

    config: MedusaConfig
    config_class = MedusaConfig
    base_model_prefix = "medusa"
    main_input_name = "hidden"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.blocks = nn.ModuleList(new_blocks(width, config.num_layers) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.vocabulary, bias=False)
            for _ in range(config.num_heads if config.own_lm_heads else 0)
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and module not in set(self.lm_heads):
            init.zeros_(module.weight)

    def forward(self, hidden: Tensor, heads: int) -> Tensor:
        """Foretell by the first heads: hidden states [..., d] -> [..., heads, d]."""
        foretold = []
        for blocks in self.blocks[:heads]:
            state = hidden
            for block in blocks:
                state = state + silu(block(state))
            foretold.append(state)
        return torch.stack(foretold, -2)

    def logits(self, foretold: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """What the first heads say of their tokens.

        Args:
            foretold: [..., heads, d].
            read_out: the target's output matrix, hidden states [..., d] -> logits [..., V].

        Returns:
            [..., heads, V].
        """
        if not self.lm_heads:
            return read_out(foretold)
        states = enumerate(foretold.unbind(-2))
        return torch.stack([self.lm_heads[head](state) for head, state in states], -2)


def new_blocks(width: int, layers: int) -> nn.ModuleList:
    """The residual blocks of one head; the released code repeats one object instead."""
    return nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
