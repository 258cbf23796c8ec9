"""The shape of Hydra's heads, and which target they are for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.llama_layer import layer_for_target, trained_for

__all__ = ["MAX_HEADS", "HydraConfig"]

MAX_HEADS = 16


@strict
class HydraConfig(PreTrainedConfig):
    """The shape of Hydra's heads; the defaults are Hydra++ (2402.05109, section 4).

    Attributes:
        target_type, target_layers: model type and layers of the target's language model; "" and 0 where a
            published checkpoint does not say.
        vocabulary: tokens that the target knows.
        hidden_size: of the target.
        num_heads: tokens foretold beyond the root.
        num_layers: layers of each head's MLP; the first of them takes in the tokens of the path.
        prefix_attention: whether a decoder layer reads the target's hidden states first and the heads its
            output. Without it, this is plain Hydra.
        own_lm_heads: whether each head has an output matrix of its own, as published ones do; else all use
            the target's, which saves 0.5 GB a head at 7 B.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps,
            rope_theta: of that layer, a Llama's. It counts its positions by itself.
        num_draft_tokens, top_k: the dynamic tree that is grown where nothing else is asked for; its depth is
            the number of heads.
        hit_rates: by head and rank, how often the target's own token was found there; measured at the end of
            the training, for static trees.
    """

    model_type = "mmspec_hydra"

    target_type: str = ""
    target_layers: int = 0
    vocabulary: int = 0
    hidden_size: int = 4096
    num_heads: int = 4
    num_layers: int = 4
    prefix_attention: bool = True
    own_lm_heads: bool = False
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_draft_tokens: int = 24
    top_k: int = 8
    hit_rates: list[list[float]] = field(default_factory=list)
    initializer_range: float = 0.02

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads: got {self.num_heads}; 1 to {MAX_HEADS}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers: got {self.num_layers}; 1 or more")

    @property
    def depth(self) -> int:
        """Of the tree that is grown where nothing else is asked for."""
        return self.num_heads

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: Any) -> HydraConfig:
        """The heads for a target of that config.

        Args:
            config: of the target.
            vocabulary: tokens that it knows.
            settings: attributes of this class, to be had otherwise.
        """
        return cls(**trained_for(config, vocabulary) | layer_for_target(config) | settings)
