"""The config of Medusa's heads."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from mmspec.models.level_heads import LevelHeadsConfig

__all__ = ["MedusaConfig"]


@strict
class MedusaConfig(LevelHeadsConfig):
    """Config of Medusa's heads.

    Attributes:
        num_layers: residual blocks of each head. Without `own_lm_heads`, a map [d, d] leads from them to the
            target's output matrix.
    """

    model_type = "mmspec_medusa"
