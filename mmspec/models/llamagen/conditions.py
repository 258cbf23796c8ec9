"""The two kinds of condition: what stands in the slots before the first image token."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from mmspec.errors import InputError
from mmspec.models.llamagen.configuration import LlamaGenConfig

__all__ = ["CaptionEmbedding", "ClassEmbedding"]


class ClassEmbedding(nn.Module):
    """Labels to vectors; the last row is the null class."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Refuse features: labels come as ids."""
        raise InputError("caption_features", features, "None: this checkpoint is conditioned on classes")


class CaptionEmbedding(nn.Module):
    """Text features to vectors, and the features of no caption, which are a buffer in official files."""

    uncond_embedding: Tensor

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.cap_proj = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(config.caption_dim, config.hidden_size, bias=False),
                act=nn.GELU("tanh"),
                fc2=nn.Linear(config.hidden_size, config.hidden_size, bias=False),
            )
        )
        self.register_buffer("uncond_embedding", torch.zeros(config.caption_length, config.caption_dim))

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Vectors [B, n, D] of the features [B, n, caption_dim] of the first n slots.

        Raises:
            InputError: there are fewer slots in `input_ids` than features, or they have another width.
        """
        expected = self.uncond_embedding.shape[1]
        if features.dim() != 3 or features.shape[2] != expected or features.shape[1] > input_ids.shape[1]:
            allowed = f"[B, n, {expected}] features of the n slots that input_ids begins with"
            raise InputError("caption_features", features, allowed)
        vectors: Tensor = self.cap_proj(features.to(self.uncond_embedding.dtype))
        return vectors
