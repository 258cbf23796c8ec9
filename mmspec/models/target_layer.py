"""The one layer of its target's own family that a head has: EAGLE's, and that of multi-token prediction."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, Emu3TextConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.emu3.modeling_emu3 import Emu3TextModel

import mmspec.models.llamagen  # noqa: F401  its model type is then one that `AutoConfig` knows
from mmspec.errors import UnsupportedModelError
from mmspec.models.head_config import HeadConfig

__all__ = ["TargetLayerConfig", "single_layer"]

#: Decoders that `AutoModel` leaves out, by their configs.
UNLISTED: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {Emu3TextConfig: Emu3TextModel}


@strict
class TargetLayerConfig(HeadConfig):
    """Config of a head with one decoder layer of its target's own family.

    Attributes:
        layer: the config of the target's language model, with one layer; as a plain table.
    """

    layer: dict[str, Any] = field(default_factory=dict)

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
                f"the head needs a layer of its target's family, and {kind!r} is not one that transformers "
                "builds by itself"
            ) from error
        return config

    @property
    def hidden_size(self) -> int:
        return int(self.layer.get("hidden_size", 0))

    @property
    def target_type(self) -> str:
        """Model type of the target's language model."""
        return str(self.layer.get("model_type", ""))


def single_layer(layer: PreTrainedConfig, *, norm: str | None = None) -> PreTrainedModel:
    """Build a decoder of the target's family whose only weights are those of one layer.

    Args:
        layer: the config of such a decoder.
        norm: name of the last norm, if that is kept.

    Raises:
        UnsupportedModelError: the family's decoder is not a stack of `layers`, or has no norm of that name.
    """
    unlisted = UNLISTED.get(type(layer))
    decoder: PreTrainedModel = unlisted._from_config(layer) if unlisted else AutoModel.from_config(layer)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedModelError(f"{type(decoder).__name__} keeps its layers where no head can be cut")
    if norm is not None and not hasattr(decoder, norm):
        raise UnsupportedModelError(f"{type(decoder).__name__} has no last norm by the name {norm!r}")
    for name, child in list(decoder.named_children()):
        if name not in ("layers", norm) and any(True for _ in child.parameters()):
            setattr(decoder, name, nn.Identity())  # embeddings are the target's
    return decoder
