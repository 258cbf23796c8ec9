"""Filter that tells from the confidences of a block which places are right already (Learn2PD, 2509.25188)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

__all__ = ["CommitFilter", "CommitFilterConfig"]


class CommitFilterConfig(PreTrainedConfig):
    """Config of a filter.

    Args:
        block_length: most places of a block that it looks at.
        width: of its hidden layer.
    """

    model_type = "mmspec_commit_filter"

    def __init__(self, block_length: int = 32, width: int = 32, **kwargs: Any) -> None:
        self.block_length, self.width = block_length, width
        super().__init__(**kwargs)


class CommitFilter(PreTrainedModel):
    """Two layers from the confidences of a block to logits that its places hold their final tokens.

    Decided places count with a confidence of 1, and so do those that a shorter block lacks.
    """

    config_class = CommitFilterConfig

    def __init__(self, config: CommitFilterConfig) -> None:
        super().__init__(config)
        size, width = config.block_length, config.width
        self.layers = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))
        self.post_init()

    def forward(self, confidence: Tensor) -> Tensor:
        """Logits [B, n] from confidences [B, n] of n <= block_length places."""
        missing = self.config.block_length - confidence.shape[1]
        whole = nn.functional.pad(confidence.float(), (0, missing), value=1.0)
        logits: Tensor = self.layers(whole)
        return logits[:, : confidence.shape[1]]


AutoConfig.register(CommitFilterConfig.model_type, CommitFilterConfig, exist_ok=True)
AutoModel.register(CommitFilterConfig, CommitFilter, exist_ok=True)
