"""The config of Hydra's heads."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from mmspec.models.level_heads import LevelHeadsConfig
from mmspec.models.llama_layer import LlamaLayerConfig

__all__ = ["HydraConfig"]


@strict
class HydraConfig(LevelHeadsConfig, LlamaLayerConfig):
    """Config of Hydra's heads; the defaults are Hydra++ (2402.05109, section 4).

    Attributes:
        num_layers: layers of each head's MLP; the first of them takes in the tokens of the path.
        prefix_attention: whether a Llama layer reads the target's hidden states first and the heads its
            output. Without it, this is plain Hydra.
    """

    model_type = "mmspec_hydra"
    least_layers = 1

    num_layers: int = 4
    prefix_attention: bool = True
