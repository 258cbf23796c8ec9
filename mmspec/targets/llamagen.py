"""LlamaGen (2406.06525) as a target: its own vocabulary is the compact one, without syntax tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.image_grid import ImageGrid
from mmspec.errors import CheckpointError
from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForCausalLM
from mmspec.targets.batches import EMBEDDINGS
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.targets.placement import execution_device

__all__ = ["LlamaGenTarget"]

STRIDE = 16  # of the tokenizer of every published transformer


class LlamaGenTarget(ImageTokenTarget):
    """Adapter from a LlamaGen transformer to the Target interface.

    Args:
        model: of classes or captions.
        vq: its image tokenizer, a diffusers `VQModel` with a normalised codebook, as `mmspec convert` writes.
        codebook: [K, d] the code vectors as they were trained, for rules that measure distances between them;
            those of `vq` if None.

    Raises:
        CheckpointError: tokenizer and transformer have codebooks of different sizes.
    """

    config: LlamaGenConfig
    only_size = "which this checkpoint was trained for"  # the rotation of a token depends on it

    def __init__(self, model: LlamaGenForCausalLM, vq: Any = None, codebook: Tensor | None = None) -> None:
        config = model.config
        stride = STRIDE
        if vq is not None:
            vectors = vq.quantize.embedding.weight
            stride = 2 ** (len(vq.config.block_out_channels) - 1)
            if codebook is None:
                codebook = vectors
            elif len(codebook) != len(vectors):
                allowed = f"{len(vectors)} vectors, as many as its image tokenizer has"
                raise CheckpointError("codebook", f"{len(codebook)} vectors", allowed)
        grid = ImageGrid(config.grid_size, config.grid_size, config.vocab_size)
        super().__init__(model, grid, stride=stride, codebook=codebook)
        self.vq = vq

    def positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Position ids of a prompt, counted back from the image: captions of any length end where it begins.

        `position_ids` [1, L] are taken as they are, as of prompts that hold a part of the image already.
        """
        length = inputs["input_ids"].shape[1]
        given = inputs.get("position_ids")
        if given is not None:
            return given, int(given[0, -1]) + 1 - length
        offset = self.config.prefix_length - length
        return offset + torch.arange(length, device=self.device)[None], offset

    def joinable(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Vectors in place of ids and captions, which differ in length where the rest does not."""
        rest = dict(inputs)
        ids, features = rest.pop("input_ids"), rest.pop("caption_features", None)
        return {**rest, EMBEDDINGS: self.model.model.embed(ids, features)}

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W] of the tokenizer's dtype."""
        from mmspec.models.autoencoders import decode_tokens

        if self.vq is None:
            raise CheckpointError("vq", None, "an image tokenizer, which turns tokens into pixels")
        return decode_tokens(self.vq, cells.to(execution_device(self.vq)))
