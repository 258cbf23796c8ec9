"""Network that tells places of a block apart by their confidences: which are right already, or come next.

The former is the filter of Learn2PD (2509.25188), the latter a head for the order of plain decoding, after
SPOT (2610.22543).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from mmspec.errors import CheckpointError

__all__ = ["CommitFilter", "CommitFilterConfig", "read_filter"]

LEAST_DOUBT = 1e-6  # 1 - p that differs from 0, and makes an input of 1


class CommitFilterConfig(PreTrainedConfig):
    """Config of a filter.

    Args:
        block_length: most places of a block that it looks at.
        width: of its hidden layer.
        log_odds: whether it reads log(p / (1 - p)) of a confidence p, in which 0.99 and 0.9999 are far from
            each other, in place of p (as published).
    """

    model_type = "mmspec_commit_filter"

    def __init__(
        self, block_length: int = 32, width: int = 32, log_odds: bool = False, **kwargs: Any
    ) -> None:
        self.block_length, self.width, self.log_odds = block_length, width, log_odds
        super().__init__(**kwargs)


class CommitFilter(PreTrainedModel):
    """Two layers from the confidences of a block to a logit for each of its places.

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
        if self.config.log_odds:
            whole = whole.logit(eps=LEAST_DOUBT) / -math.log(LEAST_DOUBT)
        logits: Tensor = self.layers(whole)
        return logits[:, : confidence.shape[1]]


def read_filter(source: Any, argument: str) -> CommitFilter:
    """A loaded filter, or that of a folder.

    Raises:
        CheckpointError: there is none; it names the argument.
    """
    if isinstance(source, CommitFilter):
        source.eval()
        return source
    if not isinstance(source, str | Path) or not (Path(source) / "config.json").is_file():
        raise CheckpointError(argument, source, "must be a folder that `mmspec-extras train-filter` wrote")
    try:
        found: CommitFilter = CommitFilter.from_pretrained(source)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(argument, source, f"is not a filter ({error})") from error
    found.eval()
    return found


AutoConfig.register(CommitFilterConfig.model_type, CommitFilterConfig, exist_ok=True)
AutoModel.register(CommitFilterConfig, CommitFilter, exist_ok=True)
