"""The one Llama layer that heads with a layer of their own have, whatever their target's family is."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig

__all__ = ["LayerShape", "layer_config", "layer_for_target", "one_layer", "trained_for"]


class LayerShape(Protocol):
    """Fields of a head's config that say how its layer is built, by Llama's names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float


def layer_config(shape: LayerShape) -> LlamaConfig:
    """The config of a decoder of one layer; it has no vocabulary of its own."""
    return LlamaConfig(
        vocab_size=1,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        hidden_act=shape.hidden_act,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def one_layer(shape: LayerShape, *, norm: bool = False) -> LlamaModel:
    """A decoder of one layer, without embedding and, unless asked for, without a norm behind it."""
    decoder = LlamaModel(layer_config(shape))
    for name in ("embed_tokens", *(() if norm else ("norm",))):
        setattr(decoder, name, nn.Identity())
    return decoder


def layer_for_target(config: PreTrainedConfig) -> dict[str, Any]:
    """The sizes of a layer for a target of that config: its width, a quarter of its heads for keys."""
    text = config.get_text_config(decoder=True)
    width, heads = int(text.hidden_size), int(text.num_attention_heads)
    return {
        "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": next(n for n in range(max(1, heads // 4), 0, -1) if heads % n == 0),
        "head_dim": int(getattr(text, "head_dim", None) or width // heads),
    }


def trained_for(config: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
    """What a head's config remembers of its target.

    Args:
        config: of the target.
        vocabulary: tokens that it knows.
    """
    text = config.get_text_config(decoder=True)
    return {
        "target_type": text.model_type,
        "target_layers": int(text.num_hidden_layers),
        "vocabulary": vocabulary,
        "hidden_size": int(text.hidden_size),
    }
