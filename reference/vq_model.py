"""The image tokenizer in training: nearest codes by angle, running means as codes, revival of dead ones."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.scenes.reader import AttributeReader
from reference.image_data import PixelBatch
from reference.image_error import ImageError

__all__ = ["VQ_SHAPES", "Reconstruction", "build_vq"]

DECAY = 0.95  # of the running means, a step
DEAD = 0.2  # of the mean use of a code, below which it is drawn anew
COMMITMENT = 0.25

VQ_SHAPES: dict[str, dict[str, Any]] = {
    "base": {"block_out_channels": (24, 48, 128), "norm_num_groups": 8, "num_vq_embeddings": 1024},
    "tiny": {"block_out_channels": (8, 8, 8), "norm_num_groups": 4, "num_vq_embeddings": 64},
}
"""Both have 4 x 4 pixels a token and codes of width 8."""


def build_vq(size: str = "base") -> VQModel:
    """A tokenizer with random weights."""
    shape = VQ_SHAPES[size]
    levels = len(shape["block_out_channels"])
    vq: VQModel = VQModel(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=8,
        vq_embed_dim=8,
        sample_size=64,
        **shape,
    )
    return vq


class Reconstruction(nn.Module):
    """Squared error of the images (see `ImageError`), and of the commitment.

    The codebook is not learnt by gradients: each code is the mean direction of the latents that chose it,
    with a memory of about twenty steps. Codes that hardly any latent chooses are put where a latent is.

    Args:
        vq: the tokenizer; its codebook is kept normalised.
        reader: compares images as the judge will; None for pixels alone.
    """

    uses: Tensor
    sums: Tensor
    moves: Tensor

    def __init__(self, vq: VQModel, reader: AttributeReader | None = None) -> None:
        super().__init__()
        self.vq = vq
        codebook = vq.quantize.embedding.weight
        codebook.requires_grad_(False)
        codebook.copy_(F.normalize(codebook, dim=-1))
        # With no use at all, every code is drawn from the latents of the first step.
        self.register_buffer("uses", torch.zeros(len(codebook)))
        self.register_buffer("sums", codebook.detach().clone())
        self.register_buffer("moves", torch.zeros((), dtype=torch.long))
        self.image_error = ImageError(reader)

    def forward(self, batch: PixelBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: squared error of the pixels, of the features, codes in use, perplexity."""
        latents = F.normalize(self.vq.encode(batch.pixels).latents, dim=1)
        codebook = self.vq.quantize.embedding.weight
        flat = rearrange(latents.detach(), "b width rows columns -> (b rows columns) width")
        chosen = (flat @ codebook.T).argmax(-1)
        rows, columns = latents.shape[2:]
        codes = rearrange(
            codebook[chosen], "(b rows columns) width -> b width rows columns", rows=rows, columns=columns
        )
        straight_through = latents + (codes - latents).detach()
        drawn = self.vq.decode(straight_through, force_not_quantize=True).sample
        loss, figures = self.image_error(drawn, batch)
        loss = loss + COMMITMENT * (latents - codes).square().mean()
        counts = torch.bincount(chosen, minlength=len(codebook)).to(flat.dtype)
        if self.training and torch.is_grad_enabled():
            self._move_codes(flat, chosen, counts)
        shares = counts / counts.sum()
        figures["codes"] = (counts > 0).sum()
        figures["perplexity"] = torch.special.entr(shares).sum().exp()
        return loss, figures

    @torch.no_grad()
    def _move_codes(self, flat: Tensor, chosen: Tensor, counts: Tensor) -> None:
        sums = torch.zeros_like(self.sums).index_add_(0, chosen, flat)
        # A generator of its own, so that a resumed run draws what an uninterrupted one would have drawn.
        generator = torch.Generator().manual_seed(int(self.moves))
        spare = flat[torch.randint(len(flat), (len(counts),), generator=generator).to(flat.device)]
        self.moves += 1
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(counts)
            torch.distributed.broadcast(spare, src=0)
        dead = self.uses <= DEAD * self.uses.mean()
        self.uses.lerp_(counts, 1 - DECAY)
        self.sums.lerp_(sums, 1 - DECAY)
        typical = self.uses.mean()
        self.sums.copy_(torch.where(dead[:, None], spare * typical, self.sums))
        self.uses.copy_(torch.where(dead, typical, self.uses))
        self.vq.quantize.embedding.weight.copy_(F.normalize(self.sums, dim=-1))
