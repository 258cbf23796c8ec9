"""The shapes of image models that predict many cells in a forward: all are LlamaGen's, with additions."""

from __future__ import annotations

import math

from huggingface_hub.dataclasses import strict

from mmspec.models.llamagen.configuration import LlamaGenConfig

__all__ = ["LPDConfig", "NARConfig", "PARConfig", "ParallelImageConfig"]

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

    def validate_regions(self) -> None:
        """Refuse regions that do not divide the image; called by `strict`."""
        side = math.isqrt(self.regions)
        if self.regions < 1 or side**2 != self.regions or self.grid_size % side:
            allowed = f"the square of a divisor of {self.grid_size}, the tokens a side"
            raise ValueError(f"regions: got {self.regions}; {allowed}")
