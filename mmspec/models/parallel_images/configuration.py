"""The shapes of image models that predict many cells in a forward: all are LlamaGen's, with additions."""

from __future__ import annotations

import math

from huggingface_hub.dataclasses import strict

from mmspec.models.llamagen.configuration import LlamaGenConfig

__all__ = ["LPDConfig", "NARConfig", "NBPConfig", "PARConfig", "ParallelImageConfig"]

BODIES = ("llamagen", "vit")


@strict
class ParallelImageConfig(LlamaGenConfig):
    """Base of the shapes of image models that predict many cells in a forward."""

    model_type = "parallel_image"


@strict
class LPDConfig(ParallelImageConfig):
    """The shape of a model whose cells are asked for by learned queries (LPD, 2507.01957).

    Attributes:
        body: "llamagen", or "vit" for that of the published checkpoints: layer norms, biases, a GELU between
            two layers, and no rotation.
        generation_steps: forwards of an image in plain decoding; None is the published number for its size.
        repulsion_threshold: largest distance of cells, the larger one of rows and columns, that are not
            decided together in plain decoding.
    """

    model_type = "lpd"

    body: str = "llamagen"
    generation_steps: int | None = None
    repulsion_threshold: int = 2

    @property
    def attention_bias(self) -> bool:  # type: ignore[override]
        """Whether queries, keys, values and outputs of attention have biases."""
        return self.body == "vit"

    def validate_body(self) -> None:
        """Refuse an unknown body; called by `strict`."""
        if self.body not in BODIES:
            raise ValueError(f"body: got {self.body!r}; {' or '.join(map(repr, BODIES))}")


@strict
class NARConfig(ParallelImageConfig):
    """The shape of a model that predicts the cells right of and below each (NAR, 2503.10696).

    Attributes:
        below_layers: last of the `num_hidden_layers`, which the prediction below goes through alone.
    """

    model_type = "nar"

    below_layers: int = 1


@strict
class PARConfig(ParallelImageConfig):
    """The shape of a model that decodes the regions of an image side by side (PAR, 2412.15119).

    Attributes:
        regions: n of an image, M x M; n - 1 special tokens are learned.
    """

    model_type = "par"

    regions: int = 4

    @property
    def group_size(self) -> int:
        """Cells that a forward decides."""
        return self.regions

    def validate_regions(self) -> None:
        """Refuse regions that do not divide the image; called by `strict`."""
        side = math.isqrt(self.regions)
        if self.regions < 1 or side**2 != self.regions or self.grid_size % side:
            allowed = f"the square of a divisor of {self.grid_size}, the tokens a side"
            raise ValueError(f"regions: got {self.regions}; {allowed}")


@strict
class NBPConfig(ParallelImageConfig):
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
        """Cells that a forward decides."""
        return self.block_size or self.grid_size

    def validate_blocks(self) -> None:
        """Refuse a clip without frames, and blocks that do not divide a frame; called by `strict`."""
        if self.frames < 1:
            raise ValueError(f"frames: got {self.frames}; at least 1")
        if self.group_size < 1 or self.grid_size**2 % self.group_size:
            allowed = f"a divisor of {self.grid_size**2}, the tokens of a frame"
            raise ValueError(f"block_size: got {self.block_size}; {allowed}")
