"""Judge of draft tokens: a linear layer on the target's last hidden state at each of them.

Judge Decoding (2501.19309). Its folder holds a config and d + 1 weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.errors import CheckpointError
from mmspec.models.checkpoint import load_checked

__all__ = ["JudgeHead", "JudgeHeadConfig", "read_judge"]


class JudgeHeadConfig(PreTrainedConfig):
    """Config of a judge; `hidden_size` is the target's."""

    model_type = "mmspec_judge"

    def __init__(self, hidden_size: int = 0, **kwargs: Any) -> None:
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class JudgeHead(PreTrainedModel):
    """Log-odds that a draft token does no harm, from the state of a target that has read it."""

    config_class = JudgeHeadConfig

    def __init__(self, config: JudgeHeadConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] final hidden states, normed -> [...] log-odds, in single precision."""
        odds: Tensor = self.layer(hidden.to(self.layer.weight.dtype))[..., 0]
        return odds


def read_judge(source: Any, argument: str) -> JudgeHead:
    """A loaded judge, or that of a folder.

    Raises:
        CheckpointError: there is none, or a weight is missing, of another shape, or not finite.
    """
    if isinstance(source, JudgeHead):
        return source
    if not isinstance(source, str | Path) or not Path(source, "config.json").is_file():
        raise CheckpointError(argument, source, "must be a folder that `mmspec-extras train-judge` wrote")
    head: JudgeHead = load_checked(JudgeHead, str(source), argument, "judge")
    return head
