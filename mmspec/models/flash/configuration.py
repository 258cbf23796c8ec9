"""The shape of a FLASH head, and which target it is for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.llama_layer import layer_for_target, trained_for

__all__ = ["MAX_BLOCK", "FlashConfig"]

MAX_BLOCK = 16


@strict
class FlashConfig(PreTrainedConfig):
    """The shape of a FLASH head.

    Its one layer is a Llama's, whatever the target's family is, and counts its positions by itself: a
    compressed prompt has fewer rows than the target's, and places on an image's grid are no longer its own.

    Other drafters of blocks are settings of this one. `compressor="identity", bias_rank=0` predicts a block
    from the prefix alone, as ParallelSpec does, with a transform for each offset instead of a trained mask
    token. With `block=2` and trees deeper than that it has Falcon's shape, block after block, with a fusion
    of each position instead of an LSTM, whose state would leak from sibling to sibling; without its glancing
    distillation (text-speculation.md, sections 3.4 and 3.5).

    Attributes:
        target_type: model type of the target's language model.
        target_layers: layers of the target, which tells models of one family and width apart.
        vocabulary: tokens that the target knows.
        hidden_size: of the target.
        intermediate_size: of the layer's feed-forward.
        num_attention_heads, num_key_value_heads, head_dim: of the layer's grouped-query attention.
        block: K, tokens predicted in one pass.
        offset_size: hidden width of the K transforms that tell the tokens of a block apart.
        bias_rank: rank of the bias that each token of a block has on the next; 0 for none, as published.
        compressor, compressor_options: what is made of each image; see `mmspec.compressors`.
        rope_theta: base of the rotary frequencies.
        num_draft_tokens, top_k: the tree where nothing else is asked for, one block deep. `top_k=1` is a
            chain, which costs a third of a tree's operations and is best where text is easily predicted.
    """

    model_type = "mmspec_flash"

    target_type: str = ""
    target_layers: int = 0
    vocabulary: int = 0
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    block: int = 5
    offset_size: int = 4096
    bias_rank: int = 256
    compressor: str = "latent"
    compressor_options: dict[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    num_draft_tokens: int = 16
    top_k: int = 4
    initializer_range: float = 0.02

    @property
    def depth(self) -> int:
        """Of that tree."""
        return self.block

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"block: got {self.block}; 1 to {MAX_BLOCK} tokens in a pass")
        if self.bias_rank < 0:
            raise ValueError(f"bias_rank: got {self.bias_rank}; 0 (none) or more")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: got {self.num_key_value_heads}; a divisor of the "
                f"{self.num_attention_heads} heads"
            )

    @classmethod
    def for_target(cls, config: PreTrainedConfig, vocabulary: int, **settings: Any) -> FlashConfig:
        """The head for a target of that config: its width, a quarter of its heads for keys and values.

        Args:
            config: of the target.
            vocabulary: tokens that it knows.
            settings: attributes of this class, to be had otherwise.
        """
        made = trained_for(config, vocabulary) | layer_for_target(config)
        width = made["hidden_size"]
        made |= {"offset_size": width, "bias_rank": min(256, width)}
        return cls(**made | settings)
