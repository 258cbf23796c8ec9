"""CTF (2503.16194) as a target: coarse tokens are decoded, and refined where an image is made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import CheckpointError
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec_extras.families.ctf.modeling import CTFConfig, CTFForCausalLM

__all__ = ["CTFTarget"]


class CTFTarget(LlamaGenTarget):
    """Adapter from a LlamaGen of coarse tokens to the Target interface.

    An output is coarse: all accelerators of images in raster order decode it, and those that are exact are so
    in coarse tokens, of which the fine ones are a function. The distance of two coarse tokens is that of the
    means of their entries.

    Args:
        model: with its refiner.
        vq, codebook: as of a `LlamaGenTarget`, of fine tokens.

    Raises:
        CheckpointError: the image tokenizer has another number of entries than the refiner predicts, or a
            coarse token stands for none of them.
    """

    config: CTFConfig
    model: CTFForCausalLM

    def __init__(self, model: CTFForCausalLM, vq: Any = None, codebook: Tensor | None = None) -> None:
        super().__init__(model, vq, codebook)
        clusters, coarse = model.refiner.cluster_of.to(self.device), self.config.vocab_size
        counts = clusters.bincount(minlength=coarse)
        if len(counts) != coarse or not bool(counts.all()):
            rule = f"must put every entry of the codebook into one of {coarse} clusters, none of them empty"
            raise CheckpointError("model", "refiner.cluster_of", rule)
        if self.codebook is not None:
            sums = torch.zeros_like(self.codebook[:coarse]).index_add_(0, clusters, self.codebook)
            self.codebook = sums / counts[:, None]

    @property
    def entries(self) -> int:
        """Entries of the codebook, of which coarse tokens are clusters."""
        return self.config.codebook_size

    def tokens_of(self, entries: Tensor) -> Tensor:
        """The clusters that entries of the codebook are in."""
        return self.model.refiner.cluster_of[entries]

    def decode_output(self, codes: Tensor, grid: ImageGrid) -> Tensor:
        """Refine the coarse codes [B, cells], and decode them into images [B, 3, H, W], about [-1, 1]."""
        return super().decode_output(self.refine(codes), grid)

    @torch.no_grad()
    def refine(self, codes: Tensor) -> Tensor:
        """Choose the likeliest fine code [B, cells] of each cell given all coarse ones, in one pass."""
        fine: Tensor = self.model.refiner(codes).argmax(-1)
        return fine
