"""Judge of draft tokens: a linear layer on the target's last hidden state at a draft token.

Judge Decoding (2501.19309). The folder of a judge holds a config and d + 1 weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


class JudgeHeadConfig(PreTrainedConfig):
    """Config of a judge; `hidden_size` is that of the target."""

    model_type = "mmspec_judge"

    def __init__(self, hidden_size: int = 0, **kwargs: Any) -> None:
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class JudgeHead(PreTrainedModel):
    """Predicts the log-odds that a draft token is harmless, from the target's hidden state at the token."""

    config_class = JudgeHeadConfig

    def __init__(self, config: JudgeHeadConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return log-odds [...] in single precision, from normed final hidden states [..., d]."""
        odds: Tensor = self.layer(hidden.to(self.layer.weight.dtype))[..., 0]
        return odds
