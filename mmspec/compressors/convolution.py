"""A strided convolution over the image (SpecVLM's Conv, 2509.11815), for any grid."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from mmspec.compressors.cells import pool
from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens
from mmspec.decoding.sampling import is_integer
from mmspec.errors import InputError
from mmspec.visual_tokens.boxes import square_grid

__all__ = ["Convolution"]


class Convolution(Compressor):
    """C cells, each a learned mixture of its own `kernel` x `kernel` places.

    The image is first read onto a grid of the size that the stride asks for, so that any grid gives
    exactly C tokens. The convolution is depthwise, then across channels (a dense one would have
    (d * kernel)^2 weights, 150 million in a 7B model), and starts as average pooling.

    Args:
        width: d, of the features.
        tokens: C.
        kernel: side and stride.

    Raises:
        InputError: a value outside its range.
    """

    def __init__(self, width: int, tokens: int = 64, kernel: int = 2) -> None:
        super().__init__(width, check_tokens(tokens))
        if not is_integer(kernel) or not 1 <= kernel <= 8:
            raise InputError("kernel", kernel, "an integer from 1 to 8")
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
