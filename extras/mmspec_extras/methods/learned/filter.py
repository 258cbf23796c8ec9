"""Network that predicts from the confidences of a block which places are final, or which come next.

The former is the filter of Learn2PD (2509.25188), the latter a head for the order of plain decoding, after
SPOT (2610.22543).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

LEAST_DOUBT = 1e-6  # smallest 1 - p that differs from 0; its log-odds are scaled to 1


class CommitFilterConfig(PreTrainedConfig):
    """Config of a filter.

    Args:
        block_length: largest number of places of a block.
        width: width of the hidden layer.
    """

    model_type = "mmspec_commit_filter"

    def __init__(self, block_length: int = 32, width: int = 32, **kwargs: Any) -> None:
        self.block_length, self.width = block_length, width
        super().__init__(**kwargs)


class CommitFilter(PreTrainedModel):
    """Maps the confidences p of a block to one logit per place, with two layers.

    It reads log(p / (1 - p)), which separates 0.99 from 0.9999, in place of p (as published). Decided
    places, and the missing places of a shorter block, have a confidence of 1.
    """

    config_class = CommitFilterConfig

    def __init__(self, config: CommitFilterConfig) -> None:
        super().__init__(config)
        size, width = config.block_length, config.width
        self.layers = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))
        self.post_init()

    def forward(self, confidence: Tensor) -> Tensor:
        """Return logits [B, n] from confidences [B, n] of n <= block_length places."""
        missing = self.config.block_length - confidence.shape[1]
        whole = nn.functional.pad(confidence.float(), (0, missing), value=1.0)
        odds = whole.logit(eps=LEAST_DOUBT) / -math.log(LEAST_DOUBT)
        logits: Tensor = self.layers(odds)
        return logits[:, : confidence.shape[1]]
