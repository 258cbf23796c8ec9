"""The config of an EAGLE head."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict

from mmspec.models.target_layer import TargetLayerConfig

__all__ = ["EagleConfig"]

VISUAL = ("fused", "embedded")


@strict
class EagleConfig(TargetLayerConfig):
    """Config of an EAGLE head, which has one decoder layer of its target's own family.

    Attributes:
        bias: whether the fusion of embedding and hidden state has one.
        input_norm: whether the layer has a norm in front, as SpecVLM's (2509.11815) and those trained here;
            EAGLE's own heads have none.
        visual: what the row of a visual token is made of: "fused", like text, of its embedding and the hidden
            state before it (EAGLE); or "embedded", its embedding as it is (MSD, 2505.14260).
        compressor, compressor_options: what becomes of each image before that; see `mmspec.compressors`.
            With "fused", "gate" is SpecVLM (2509.11815); with "embedded", "vispec" is ViSpec (2509.15235);
            "none" hides images from the head (HiViS, 2509.23928).
        own_embedding: whether it embeds tokens by a matrix of its own, and all slots of a prompt as token 0,
            as LANTERN's drafters for LlamaGen do (2410.03355).
        one_axis: whether positions count tokens, though those of the target have axes of their own in images
            (ViSpec's release for Qwen2.5-VL).
        num_draft_tokens, depth, top_k: the dynamic tree that it grows where nothing else is asked for. Words
            are predicted best by deep trees; images, whose distributions are flat, by wide ones.
    """

    model_type = "mmspec_eagle"

    bias: bool = True
    input_norm: bool = True
    visual: str = "fused"
    compressor: str = "identity"
    compressor_options: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = False
    one_axis: bool = False
    depth: int = 5

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if self.visual not in VISUAL:
            raise ValueError(f"visual: got {self.visual!r}; one of {', '.join(VISUAL)}")
