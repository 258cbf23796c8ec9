"""PAR (2412.15119): LlamaGen's transformer, with learned tokens for the regions of an image."""

from __future__ import annotations

import math

from huggingface_hub.dataclasses import strict
from torch import nn

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM, LlamaGenModel

__all__ = ["PARConfig", "PARForCausalLM", "PARModel"]


@strict
class PARConfig(LlamaGenConfig):
    """Config of a model that decodes the regions of an image in parallel (PAR, 2412.15119).

    Attributes:
        regions: number of regions n = M x M of an image; the model has n - 1 special tokens.
    """

    model_type = "par"

    regions: int = 4

    @property
    def group_size(self) -> int:
        """Cells that a forward pass decides."""
        return self.regions

    def validate_regions(self) -> None:
        """Raise ValueError for regions that do not divide the image; called by `strict`."""
        side = math.isqrt(self.regions)
        if self.regions < 1 or side**2 != self.regions or self.grid_size % side:
            rule = f"must be the square of a divisor of {self.grid_size}, the tokens per side"
            raise ValueError(f"regions {rule}; got {self.regions}")


class PARModel(LlamaGenModel):
    """LlamaGen's transformer, with a special token for each region except the last."""

    config: PARConfig
    config_class: type[LlamaGenConfig] = PARConfig

    def __init__(self, config: PARConfig) -> None:
        super().__init__(config)
        self.special_tokens = nn.Embedding(config.group_size - 1, config.hidden_size)
        self.post_init()


class PARForCausalLM(LlamaGenForCausalLM):
    """PAR: predicts the next token, and in groups the next token of every region."""

    config: PARConfig
    model: PARModel
    config_class = PARConfig
    decoder_class = PARModel
