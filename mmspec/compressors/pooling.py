"""Compressors over the grid of an image: all tokens, none, pooled cells, a strided convolution."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.errors import InputError
from mmspec.validation import is_integer
from mmspec.visual_tokens.tokens import VisualTokens, overlap, raster, square_grid

__all__ = ["Convolution", "Identity", "NoTokens", "Pooling", "pool"]


class NoTokens(Compressor):
    """No visual tokens: the target's features at the text rows carry the image (HiViS, 2509.23928)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, tokens=0)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return VisualTokens(images.features[:, :0], images.mask[:, :0], images.boxes[:, :0])


class Identity(Compressor):
    """All visual tokens, C = N: the baseline that compression is measured against."""

    def __init__(self, width: int) -> None:
        super().__init__(width, tokens=None)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return images


def pool(images: VisualTokens, rows: int, columns: int) -> VisualTokens:
    """Mean of the tokens in each cell of a grid, weighted by the covered share of the cell.

    Equals `avg_pool2d` if one grid divides the other. A base view and its tiles have equal weight; tokens
    without a place are skipped; cells without tokens are padding.
    """
    cells = raster(rows, columns).to(images.boxes)
    weights = overlap(images.boxes, cells) * images.mask[:, None]
    covered = weights.sum(-1)
    mask = covered > 0
    shares = weights / covered.where(mask, 1.0)[..., None]
    mean = shares.to(images.features) @ images.features
    return VisualTokens(mean, mask, cells.expand(len(mean), -1, -1))


class Pooling(Compressor):
    """Average pooling to a grid of C cells, as square as possible (SpecVLM's Pool, 2509.11815)."""

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.grid = square_grid(tokens)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return pool(images, *self.grid)


class Convolution(Compressor):
    """Strided convolution: C cells, each a learned mixture of `kernel` x `kernel` places (SpecVLM's Conv).

    2509.11815. The image is first resampled to the grid that the stride needs, so that any image gives
    exactly C tokens. The convolution is depthwise, then across channels (a dense one would have (d *
    kernel)^2 weights, 150 million in a 7B model), and is initialised as average pooling.
    """

    def __init__(self, width: int, tokens: int = 64, kernel: int = 2) -> None:
        super().__init__(width, check_tokens(tokens))
        if not is_integer(kernel) or not 1 <= kernel <= 8:
            raise InputError("kernel", kernel, "must be an integer from 1 to 8")
        self.kernel = kernel
        self.grid = square_grid(tokens)
        self.depthwise = nn.Conv2d(width, width, kernel, stride=kernel, groups=width)
        self.pointwise = nn.Linear(width, width)
        with torch.no_grad():
            self.depthwise.weight.fill_(kernel**-2)
            self.pointwise.weight.copy_(torch.eye(width))
            for layer in (self.depthwise, self.pointwise):
                if layer.bias is not None:
                    layer.bias.zero_()

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        rows, columns = self.grid
        fine = pool(images, rows * self.kernel, columns * self.kernel)
        places = rearrange(fine.features, "p (rows columns) d -> p d rows columns", rows=rows * self.kernel)
        mixed = rearrange(self.depthwise(places), "p d rows columns -> p (rows columns) d")
        coarse = pool(images, rows, columns)
        return VisualTokens(self.pointwise(mixed), coarse.mask, coarse.boxes)
