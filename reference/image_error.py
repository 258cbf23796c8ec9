"""The error of reconstructed images, which both image tokenizers learn from: of pixels, and of features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmspec.scenes.reader import AttributeReader
from reference.image_data import PixelBatch

__all__ = ["ImageError"]

FEATURE_WEIGHT = 0.08  # makes the error of the features about as large as that of the pixels


class ImageError:
    """Squared error of the pixels, and of the reader's features if there is a reader.

    It is no module, so that a learner that holds it neither trains nor saves the reader.

    Args:
        reader: compares images as the judge will; None for pixels alone.
    """

    def __init__(self, reader: AttributeReader | None = None) -> None:
        self.reader = None if reader is None else reader.eval().requires_grad_(False)

    def __call__(self, drawn: Tensor, batch: PixelBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of images [B, 3, H, W], and figures: squared error of the pixels, of the features."""
        real = batch.pixels
        loss = ((drawn - real).square() * batch.weights).mean() / batch.weights.mean()
        figures = {"mse": F.mse_loss(drawn, real)}
        if self.reader is not None:
            figures["features"] = _feature_error(self.reader, drawn, real)
            loss = loss + FEATURE_WEIGHT * figures["features"]
        return loss, figures


def _feature_error(reader: AttributeReader, drawn: Tensor, real: Tensor) -> Tensor:
    """Mean squared distance of the states after every layer, each in units of its own spread."""
    with torch.no_grad():
        wanted = reader.tower(real, output_hidden_states=True).hidden_states[1:]
    seen = reader.tower(drawn, output_hidden_states=True).hidden_states[1:]
    errors = [(one - other).square().mean() / other.var() for one, other in zip(seen, wanted, strict=True)]
    return torch.stack(errors).mean()
