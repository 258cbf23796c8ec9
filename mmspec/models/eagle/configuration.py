"""The config of an EAGLE head."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

import mmspec.models.llamagen  # noqa: F401  its model type is then one that `AutoConfig` knows
from mmspec.errors import UnsupportedModelError
from mmspec.models.head_config import HeadConfig

__all__ = ["EagleConfig"]

VISUAL = ("fused", "embedded")


@strict
class EagleConfig(HeadConfig):
    """Config of an EAGLE head, which has one decoder layer of its target's own family.

    Attributes:
        layer: the config of the target's language model, with one layer; as a plain table.
        bias: whether the fusion of embedding and hidden state has one.
        input_norm: whether the layer has a norm in front, as SpecVLM's (2509.11815) and those trained here;
            EAGLE's own heads have none.
        visual: what the row of a visual token is made of: "fused", like text, of its embedding and the hidden
            state before it (EAGLE); or "embedded", its embedding as it is (MSD, 2505.14260).
        compressor, compressor_options: what becomes of each image before that; see `mmspec.compressors`.
            With "fused", "gate" is SpecVLM (2509.11815); with "embedded", "vispec" is ViSpec (2509.15235);
            "none" hides images from the head (HiViS, 2509.23928).
        num_draft_tokens, depth, top_k: the dynamic tree that it grows where nothing else is asked for. Words
            are predicted best by deep trees; images, whose distributions are flat, by wide ones.
    """

    model_type = "mmspec_eagle"

    layer: dict[str, Any] = field(default_factory=dict)
    bias: bool = True
    input_norm: bool = True
    visual: str = "fused"
    compressor: str = "identity"
    compressor_options: dict[str, Any] = field(default_factory=dict)
    depth: int = 5

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if self.visual not in VISUAL:
            raise ValueError(f"visual: got {self.visual!r}; one of {', '.join(VISUAL)}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of every head, and the target's own layer."""
        layer = text.to_dict() | {"num_hidden_layers": 1}
        types = getattr(text, "layer_types", None)
        if types is not None:
            layer["layer_types"] = ["full_attention" if "full_attention" in types else types[-1]]
        for name in ("dtype", "architectures", "_name_or_path", "transformers_version"):
            layer.pop(name, None)
        cls(layer=layer).layer_config()  # a family that is not known is refused now
        return super().sizes_for(text, vocabulary) | {"layer": layer}

    def layer_config(self) -> PreTrainedConfig:
        """The config of the decoder of one layer."""
        table = dict(self.layer)
        kind = table.pop("model_type", None)
        try:
            config: PreTrainedConfig = AutoConfig.for_model(kind, **table)
        except ValueError as error:
            raise UnsupportedModelError(
                f"an EAGLE head needs a layer of its target's family, and {kind!r} is not one that "
                "transformers builds by itself"
            ) from error
        return config

    @property
    def hidden_size(self) -> int:
        return int(self.layer.get("hidden_size", 0))

    @property
    def target_type(self) -> str:
        """Model type of the target's language model."""
        return str(self.layer.get("model_type", ""))
