"""The transformer of NBP (2502.07737): PAR's, with special tokens that predict the second block of a clip."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.par.modeling import PARModel


@strict
class NBPConfig(LlamaGenConfig):
    """Config of a model that predicts the next block of a clip (NBP, 2502.07737).

    The frames of a clip, `grid_size` tokens a side, form a strip, one below another. Positions are those of
    the strip: a row of a frame is `grid_size` rows below the same row of the frame before.

    Attributes:
        frames: number of frames of tokens; 5 for the 17 video frames of the paper.
        block_size: number n of tokens per block, in raster order; None for a row of a frame. n - 1 special
            tokens are learned.
    """

    model_type = "nbp"

    frames: int = 5
    block_size: int | None = None

    @property
    def image_tokens(self) -> int:
        """Number of tokens of a clip."""
        return self.frames * self.grid_size**2

    @property
    def group_size(self) -> int:
        """Number of cells that a forward pass decides."""
        return self.block_size or self.grid_size

    def validate_blocks(self) -> None:
        """Raise ValueError for a clip without frames, or a block that does not divide a frame."""
        if self.frames < 1:
            raise ValueError(f"frames must be at least 1; got {self.frames}")
        if self.group_size < 1 or self.grid_size**2 % self.group_size:
            rule = f"must divide {self.grid_size**2}, the tokens of a frame"
            raise ValueError(f"block_size {rule}; got {self.block_size}")


class NBPModel(PARModel):
    """LlamaGen's transformer, with special tokens that predict the second block of a clip."""

    config: NBPConfig  # type: ignore[assignment]
    config_class = NBPConfig


class NBPForCausalLM(LlamaGenForCausalLM):
    """NBP: each token predicts the next one, or in blocks the token at its place in the next block."""

    config: NBPConfig
    config_class = NBPConfig
    decoder_class = NBPModel
