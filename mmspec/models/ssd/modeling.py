"""The head of vertical drafts (SSD, 2606.20543): from the target's states at a cell to the token below it.

Two linear layers and what the target has: its states are read, and its output matrix reads out. Both prompts'
states are read side by side and give the guided distribution at once.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from mmspec.models.feature_head import WindowHead
from mmspec.models.ssd.configuration import VerticalConfig

__all__ = ["VerticalHead"]


class VerticalHead(WindowHead):
    """Predicts the token below a cell from the target's hidden states at the cell."""

    config: VerticalConfig
    config_class = VerticalConfig
    base_model_prefix = "ssd"
    main_input_name = "states"

    def __init__(self, config: VerticalConfig) -> None:
        super().__init__(config)
        states = 2 * len(config.taps) * config.hidden_size
        self.norm = nn.RMSNorm(states, config.rms_norm_eps)
        self.of_states = nn.Linear(states, config.width, bias=False)
        self.to_states = nn.Linear(config.width, config.hidden_size, bias=False)
        self.post_init()

    def forward(self, states: Tensor) -> Tensor:
        """Predict final hidden states, which the target's output matrix turns into guided logits.

        Args:
            states: [..., 2d * taps] of `join`, at cells.

        Returns:
            [..., d], for the cells below.
        """
        read: Tensor = self.of_states(self.norm(states.to(self.dtype)))
        below: Tensor = self.to_states(silu(read))
        return below
