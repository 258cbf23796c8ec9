"""Causal models of continuous tokens as targets: vectors in, a distribution of the next vector out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.decoding.cache import RaggedCache
from mmspec.models.continuous import ContinuousForCausalLM
from mmspec.targets.causal import CausalTarget

__all__ = ["ContinuousTarget"]


class ContinuousTarget(CausalTarget):
    """Adapter from a causal model of vectors to the Target interface.

    What the interface calls logits are the parameters of the model's head, [B, n, 2 d]; `GaussianSampler`
    makes distributions of them.

    Args:
        model: a loaded model in eval mode.

    Attributes:
        vector_size: d of a vector.
    """

    model: ContinuousForCausalLM

    def __init__(self, model: ContinuousForCausalLM) -> None:
        super().__init__(model)
        self.vector_size = model.config.latent_size

    def forward(
        self, inputs: Mapping[str, Any], cache: RaggedCache, keep: int = 0, whole: bool = False
    ) -> Tensor:
        """Parameters of the head [B, n or 1, 2 d]."""
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        parameters: Tensor = self.model(inputs["input_ids"], **others, **self.told(cache))
        return parameters[:, -keep:]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed vectors [B, n, d] for the first layer, [B, n, hidden]."""
        return self.model.embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Parameters [B, n, 2 d] of final hidden states, normed [B, n, hidden]."""
        parameters: Tensor = self.model.head(hidden)
        return parameters
