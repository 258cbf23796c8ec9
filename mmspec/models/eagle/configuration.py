"""The shape of an EAGLE head: one decoder layer of its target's own family, and which target that is."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig

import mmspec.models.llamagen  # noqa: F401  its model type is then one that `AutoConfig` knows
from mmspec.errors import UnsupportedModelError

__all__ = ["EagleConfig"]

VISUAL = ("fused", "embedded")


@strict
class EagleConfig(PreTrainedConfig):
    """The shape of an EAGLE head.

    Attributes:
        layer: the config of the target's language model, with one layer; as a plain table.
        vocabulary: tokens that the target knows, which for an image are its codes and syntax alone.
        target_layers: layers of the target, which tells models of one family and width apart.
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
    vocabulary: int = 0
    target_layers: int = 0
    bias: bool = True
    input_norm: bool = True
    visual: str = "fused"
    compressor: str = "identity"
    compressor_options: dict[str, Any] = field(default_factory=dict)
    num_draft_tokens: int = 24
    depth: int = 5
    top_k: int = 8
    initializer_range: float = 0.02

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if self.visual not in VISUAL:
            raise ValueError(f"visual: got {self.visual!r}; one of {', '.join(VISUAL)}")

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: Any) -> EagleConfig:
        """The head for a target of that config, by its language model alone.

        Args:
            config: of the target.
            vocabulary: tokens that it knows.
            settings: attributes of this class, to be had otherwise.

        Raises:
            UnsupportedModelError: the language model is of no family whose layers are known to mmspec.
        """
        text = config.get_text_config(decoder=True)
        layer = text.to_dict() | {"num_hidden_layers": 1}
        types = getattr(text, "layer_types", None)
        if types is not None:
            layer["layer_types"] = ["full_attention" if "full_attention" in types else types[-1]]
        for name in ("dtype", "architectures", "_name_or_path", "transformers_version"):
            layer.pop(name, None)
        made = cls(layer=layer, vocabulary=vocabulary, target_layers=int(text.num_hidden_layers), **settings)
        made.layer_config()
        return made

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
