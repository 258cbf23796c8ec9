"""The head of vertical drafts (SSD, 2606.20543): predicts the token below a cell from states at the cell.

Two linear layers map the target's states to the input of its output matrix. The states of the conditional and
the unconditional prompt are read together, so that the output is the guided distribution.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from mmspec.heads.configuration import WindowHeadConfig
from mmspec.heads.model import WindowHead

NARROW, SHARE = 192, 4  # the width of a head is a quarter of its target's, but at least 192


@strict
class VerticalConfig(WindowHeadConfig):
    """Config of a head that predicts the token below a cell; `width` is that of its inner layer."""

    model_type = "mmspec_ssd"
    width: int = NARROW

    def validate_architecture(self) -> None:
        """Raise ValueError for sizes that cannot be built; called by `strict`."""
        if min(self.width, self.window) < 1:
            raise ValueError(f"width ({self.width}) and window ({self.window}) must be at least 1")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        width = max(NARROW, int(text.hidden_size) // SHARE)
        return super().sizes_for(text, vocabulary) | {"width": width}


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
        """Return final states [..., d] for the cells below, from joined states [..., 2d * taps] at cells."""
        read: Tensor = self.of_states(self.norm(states.to(self.dtype)))
        below: Tensor = self.to_states(silu(read))
        return below
