"""The config of a head for multi-token prediction."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.target_layer import TargetLayerConfig

__all__ = ["MtpConfig", "with_experts"]


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
        kinds = getattr(text, "mlp_layer_types", None)
        last = int(text.num_hidden_layers) - 1
        dense = kinds[-1] == "dense" if kinds else last in (getattr(text, "mlp_only_layers", None) or ())
        return sizes | {"layer": with_experts(sizes["layer"], not dense)}


def with_experts(layer: dict[str, Any], sparse: bool) -> dict[str, Any]:
    """The config of one layer, as a table, whose words for this are set: with experts, or without."""
    words: dict[str, Any] = {
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    return layer | {word: value for word, value in words.items() if layer.get(word) is not None}
