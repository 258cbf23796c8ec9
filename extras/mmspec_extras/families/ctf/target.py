"""CTF (2503.16194) as a target: decodes coarse tokens, and refines them before an image is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import CheckpointError
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec_extras.families.ctf.modeling import CTFConfig, CTFForCausalLM


class CTFTarget(LlamaGenTarget):
    """Adapter from a LlamaGen of coarse tokens to the Target interface.

    The output consists of coarse tokens, which all accelerators of raster images decode. "Exact" refers to
    the coarse tokens; the fine tokens are a function of them. The distance of two coarse tokens is that of
    the means of their entries.

    Args:
        model: the model with its refiner.
        vq, codebook: see `LlamaGenTarget`; those of the fine tokens.

    Raises:
        CheckpointError: the image tokenizer and the refiner differ in the number of entries, or a coarse
            token has no entry.
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
        """Number of entries of the codebook, before clustering."""
        return self.config.codebook_size

    def tokens_of(self, entries: Tensor) -> Tensor:
        """Return the clusters of entries of the codebook."""
        return self.model.refiner.cluster_of[entries]

    def decode_output(self, codes: Tensor, grid: ImageGrid) -> Tensor:
        """Refine the coarse codes [B, cells], and decode them into images [B, 3, H, W], about [-1, 1]."""
        return super().decode_output(self.refine(codes), grid)

    @torch.no_grad()
    def refine(self, codes: Tensor) -> Tensor:
        """Return the likeliest fine codes [B, cells] given all coarse codes, in one forward pass."""
        fine: Tensor = self.model.refiner(codes).argmax(-1)
        return fine
