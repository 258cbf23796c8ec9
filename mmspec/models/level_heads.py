"""The config that Medusa's and Hydra's heads share: each predicts the tokens of one level of the tree."""

from __future__ import annotations

from dataclasses import field

from huggingface_hub.dataclasses import strict

from mmspec.models.head_config import SizedHeadConfig

__all__ = ["MAX_HEADS", "LevelHeadsConfig"]

MAX_HEADS = 16


@strict
class LevelHeadsConfig(SizedHeadConfig):
    """Config of heads that each predict one level of the tree, which is as deep as there are heads.

    Attributes:
        num_heads: tokens predicted beyond the root.
        own_lm_heads: whether each head has an output matrix [V, d] of its own, as published ones do, which is
            0.5 GB a head at 7 B; else all use the target's.
        hit_rates: by head and rank, how often the target's own token was found there; measured at the end of
            the training, for static trees.
    """

    least_layers = 0  # no field: a bound that each kind has

    num_heads: int = 4
    num_layers: int = 1
    own_lm_heads: bool = False
    hit_rates: list[list[float]] = field(default_factory=list)

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads: got {self.num_heads}; 1 to {MAX_HEADS}")
        if self.num_layers < self.least_layers:
            raise ValueError(f"num_layers: got {self.num_layers}; {self.least_layers} or more")

    @property
    def depth(self) -> int:
        """Depth of the tree that is grown where nothing else is asked for."""
        return self.num_heads
