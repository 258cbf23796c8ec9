"""The shape of an EAGLE-3 head, and which target it is for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.feature_head import HIDDEN
from mmspec.models.llama_layer import layer_for_target, trained_for

__all__ = ["Eagle3Config", "three_taps"]

DRAFT_VOCABULARY = 32000  # the published heads'
LARGE = 2 * DRAFT_VOCABULARY  # below, the few tokens that a map would save are not worth missing
SHALLOWEST = 7  # layers of a target whose published taps differ


@strict
class Eagle3Config(PreTrainedConfig):
    """The shape of an EAGLE-3 head.

    Its one layer is a Llama's, whatever the target's family is, and counts its positions by itself.

    Attributes:
        target_type: model type of the target's language model.
        target_layers: layers of the target, which tells models of one family and width apart; 0 where a
            published head does not say.
        vocabulary: tokens that the target knows.
        hidden_size: of the target.
        taps: hidden states of the target that are read: k for what enters layer k, -1 for the final one.
        draft_vocabulary: tokens that the head knows, at most those of the target.
        norm_before_residual: whether the layer adds to the normed feature, as most heads of speculators do,
            instead of to the feature as it is.
        intermediate_size: of the layer's feed-forward.
        num_attention_heads, num_key_value_heads, head_dim: of the layer's grouped-query attention.
        rope_theta: base of the rotary frequencies.
        num_draft_tokens, depth, top_k: the dynamic tree that it grows where nothing else is asked for.
    """

    model_type = "mmspec_eagle3"

    target_type: str = ""
    target_layers: int = 0
    vocabulary: int = 0
    hidden_size: int = 4096
    taps: list[int] = field(default_factory=lambda: [2, 16, 29])
    draft_vocabulary: int = 0
    norm_before_residual: bool = False
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    num_draft_tokens: int = 24
    depth: int = 5
    top_k: int = 8
    initializer_range: float = 0.02

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 0 <= self.draft_vocabulary <= self.vocabulary:
            raise ValueError(
                f"draft_vocabulary: got {self.draft_vocabulary}; at most {self.vocabulary}, the vocabulary"
            )
        deepest = self.target_layers - 1 if self.target_layers else max(self.taps, default=0)
        if not self.taps or any(not HIDDEN <= tap <= deepest for tap in self.taps):
            raise ValueError(f"taps: got {self.taps}; from -1 to {deepest}")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: got {self.num_key_value_heads}; a divisor of the "
                f"{self.num_attention_heads} heads"
            )

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: Any) -> Eagle3Config:
        """The head for a target of that config; its vocabulary is reduced where the target's is large.

        Args:
            config: of the target.
            vocabulary: tokens that it knows.
            settings: attributes of this class, to be had otherwise.
        """
        made: dict[str, Any] = {**layer_for_target(config), **trained_for(config, vocabulary)}
        made |= {
            "taps": three_taps(made["target_layers"]),
            "draft_vocabulary": DRAFT_VOCABULARY if vocabulary > LARGE else vocabulary,
        }
        return cls(**made | settings)


def three_taps(layers: int) -> list[int]:
    """What enters layers 2, L // 2 and L - 3 of a target of L layers, as published.

    Where these are not three (fewer than 7 layers), the last three states are read, the final one included;
    a target of one layer has two.
    """
    if layers >= SHALLOWEST:
        return [2, layers // 2, layers - 3]
    return [*range(layers), HIDDEN][-3:]
