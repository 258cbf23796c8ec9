"""The one Llama layer that heads with a layer of their own have, whatever their target's family is."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig

from mmspec.models.head_config import SizedHeadConfig

__all__ = ["LlamaLayerConfig", "one_layer"]

BY_LLAMAS_NAMES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps"),
)


@strict
class LlamaLayerConfig(SizedHeadConfig):
    """Config of a head with a Llama layer, which counts its positions by itself.

    Attributes:
        intermediate_size: of the layer's feed-forward.
        num_attention_heads, num_key_value_heads, head_dim: of the layer's grouped-query attention.
        rope_theta: base of the rotary frequencies.
    """

    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def validate_heads(self) -> None:
        """Refuse groups of heads of different sizes; called by `strict`."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups < 1 or heads % groups:
            raise ValueError(f"num_key_value_heads: got {groups}; a divisor of the {heads} heads")

    def layer_settings(self) -> dict[str, Any]:
        """Settings of the layer by the names of Llama's config."""
        return {name: getattr(self, name) for name in BY_LLAMAS_NAMES} | {
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        }

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of every head, and of a layer with a quarter of the target's heads for keys."""
        width, heads = int(text.hidden_size), int(text.num_attention_heads)
        return super().sizes_for(text, vocabulary) | {
            "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * width),
            "num_attention_heads": heads,
            "num_key_value_heads": next(n for n in range(max(1, heads // 4), 0, -1) if heads % n == 0),
            "head_dim": int(getattr(text, "head_dim", None) or width // heads),
        }


def one_layer(config: LlamaLayerConfig, *, norm: bool = False) -> LlamaModel:
    """Build a decoder of one layer, without embedding and, unless asked for, without a norm behind it."""
    decoder = LlamaModel(LlamaConfig(vocab_size=1, num_hidden_layers=1, **config.layer_settings()))
    for name in ("embed_tokens", *(() if norm else ("norm",))):
        setattr(decoder, name, nn.Identity())
    return decoder
