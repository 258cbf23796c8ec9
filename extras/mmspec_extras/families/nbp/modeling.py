"""The transformer of NBP (2502.07737): PAR's, whose special tokens begin a clip's second block."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.par.modeling import PARModel

__all__ = ["NBPConfig", "NBPForCausalLM", "NBPModel"]


@strict
class NBPConfig(LlamaGenConfig):
    """The shape of a model that predicts the next block of a clip (NBP, 2502.07737).

    The frames of a clip, `grid_size` tokens a side, stand one below another, and positions are those of this
    strip: a row of a frame stands `grid_size` rows below the same row of the frame before.

    Attributes:
        frames: of a clip; the published 17 frames of a video are 5 of tokens.
        block_size: n tokens of a block, in raster order; None for a row of a frame. n - 1 special tokens are
            learned.
    """

    model_type = "nbp"

    frames: int = 5
    block_size: int | None = None

    @property
    def image_tokens(self) -> int:
        """Tokens of a clip."""
        return self.frames * self.grid_size**2

    @property
    def group_size(self) -> int:
        """Cells that a forward pass decides."""
        return self.block_size or self.grid_size

    def validate_blocks(self) -> None:
        """Refuse a clip without frames, and blocks that do not divide a frame; called by `strict`."""
        if self.frames < 1:
            raise ValueError(f"frames: got {self.frames}; at least 1")
        if self.group_size < 1 or self.grid_size**2 % self.group_size:
            rule = f"must divide {self.grid_size**2}, the tokens of a frame"
            raise ValueError(f"block_size {rule}; got {self.block_size}")


class NBPModel(PARModel):
    """LlamaGen's transformer, with tokens that ask for the second block of a clip but its first token."""

    config: NBPConfig  # type: ignore[assignment]
    config_class = NBPConfig


class NBPForCausalLM(LlamaGenForCausalLM):
    """NBP: the next token, and in blocks the token at the same place of the next block."""

    config: NBPConfig
    config_class = NBPConfig
    decoder_class = NBPModel
