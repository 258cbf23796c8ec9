"""The config of a head for multi-token prediction."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.target_layer import TargetLayerConfig

__all__ = ["MtpConfig"]


@strict
class MtpConfig(TargetLayerConfig):
    """Config of a head for multi-token prediction, whose layer is of the target's own family.

    Attributes:
        num_draft_tokens, depth, top_k: the dynamic tree that it grows where nothing else is asked for.
    """

    model_type = "mmspec_mtp"

    depth: int = 5

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of every head, and the target's last layer: published ones have experts where it has."""
        sizes = super().sizes_for(text, vocabulary)
        layer = sizes["layer"]
        if layer.get("mlp_layer_types"):
            layer["mlp_layer_types"] = layer["mlp_layer_types"][-1:]
        if layer.get("first_k_dense_replace"):
            layer["first_k_dense_replace"] = 0
        return sizes
