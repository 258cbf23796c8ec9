"""The shape of Hydra's heads."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.level_heads import LevelHeadsConfig
from mmspec.models.llama_layer import layer_for_target

__all__ = ["HydraConfig"]


@strict
class HydraConfig(LevelHeadsConfig):
    """The shape of Hydra's heads; the defaults are Hydra++ (2402.05109, section 4).

    What is not said here is as of `LevelHeadsConfig`.

    Attributes:
        num_layers: layers of each head's MLP; the first of them takes in the tokens of the path.
        prefix_attention: whether a decoder layer reads the target's hidden states first and the heads its
            output. Without it, this is plain Hydra.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps,
            rope_theta: of that layer, a Llama's. It counts its positions by itself.
    """

    model_type = "mmspec_hydra"
    least_layers = 1

    num_layers: int = 4
    prefix_attention: bool = True
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @classmethod
    def sizes_for(cls, config: PreTrainedConfig) -> dict[str, Any]:
        return layer_for_target(config)
