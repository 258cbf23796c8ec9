"""What Medusa's and Hydra's heads have in common: each predicts the tokens of one level of the tree."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.llama_layer import trained_for

__all__ = ["MAX_HEADS", "LevelHeadsConfig"]

MAX_HEADS = 16


@strict
class LevelHeadsConfig(PreTrainedConfig):
    """The shape of heads, one for each level, and which target they are for.

    Attributes:
        target_type, target_layers: model type and layers of the target's language model; "" and 0 where a
            published checkpoint does not say.
        vocabulary: tokens that the target knows.
        hidden_size: of the target.
        num_heads: tokens predicted beyond the root.
        own_lm_heads: whether each head has an output matrix [V, d] of its own, as published ones do, which is
            0.5 GB a head at 7 B; else all use the target's.
        num_draft_tokens, top_k: the dynamic tree that is grown where nothing else is asked for; its depth is
            the number of heads.
        hit_rates: by head and rank, how often the target's own token was found there; measured at the end of
            the training, for static trees.
    """

    least_layers = 0  # no field: a bound that each kind has

    target_type: str = ""
    target_layers: int = 0
    vocabulary: int = 0
    hidden_size: int = 4096
    num_heads: int = 4
    num_layers: int = 1
    own_lm_heads: bool = False
    num_draft_tokens: int = 24
    top_k: int = 8
    hit_rates: list[list[float]] = field(default_factory=list)
    initializer_range: float = 0.02

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads: got {self.num_heads}; 1 to {MAX_HEADS}")
        if self.num_layers < self.least_layers:
            raise ValueError(f"num_layers: got {self.num_layers}; {self.least_layers} or more")

    @property
    def depth(self) -> int:
        """Of the tree that is grown where nothing else is asked for."""
        return self.num_heads

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: Any) -> Self:
        """The heads for a target of that config.

        Args:
            config: of the target.
            vocabulary: tokens that it knows.
            settings: attributes of this class, to be had otherwise.
        """
        return cls(**trained_for(config, vocabulary) | cls.sizes_for(config) | settings)

    @classmethod
    def sizes_for(cls, config: PreTrainedConfig) -> dict[str, Any]:
        """Sizes that depend on more of the target than its width; none by default."""
        return {}
