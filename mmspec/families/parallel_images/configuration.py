"""The shapes of image models that predict many cells in a forward: all are LlamaGen's, with additions."""

from __future__ import annotations

import math
from typing import Any

from huggingface_hub.dataclasses import strict

from mmspec.families.llamagen.configuration import LlamaGenConfig

__all__ = [
    "LPDConfig",
    "NARConfig",
    "PARConfig",
    "ParallelImageConfig",
    "VARConfig",
]

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
            decided together in plain decoding; None is the published one of a checkpoint of this shape,
            or 2.
    """

    model_type = "lpd"

    body: str = "llamagen"
    generation_steps: int | None = None
    repulsion_threshold: int | None = None

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
class VARConfig(ParallelImageConfig):
    """The shape of a model that predicts an image scale by scale, each in one forward (VAR, 2404.02905).

    Attributes:
        patch_nums: tokens a side of each scale, from the coarsest to the image's own grid.
        latent_channels: width of the image tokenizer's code vectors, of which the input of a scale is made.
        shared_modulation: whether the layers share the matrix that makes their scales, shifts and gates of
            the class, as in the published 36 layers.
        normalised_attention: whether queries and keys have length 1, and each head a learned scale.
    """

    model_type = "var"

    attention_bias = True  # that of keys is 0 in published files
    layer_norm_eps = 1e-6

    patch_nums: list[int] | tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
    latent_channels: int = 32
    shared_modulation: bool = False
    normalised_attention: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.patch_nums:
            self.grid_size = self.patch_nums[-1]
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def validate_patch_nums(self) -> None:
        """Refuse what is no sequence of ever finer scales; called by `strict`."""
        sides = self.patch_nums
        if not sides or sides[0] < 1 or any(b <= a for a, b in zip(sides, sides[1:], strict=False)):
            raise ValueError(f"patch_nums: got {sides}; positive integers, each larger than the one before")

    @property
    def prefix_length(self) -> int:
        """No slots before the image: the class is what the first scale reads."""
        return 0

    @property
    def image_tokens(self) -> int:
        """Tokens of all scales of an image."""
        return sum(side**2 for side in self.patch_nums)
