"""The shape of a FLASH head, and which target it is for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig

__all__ = ["MAX_BLOCK", "FlashConfig"]

MAX_BLOCK = 16


@strict
class FlashConfig(PreTrainedConfig):
    """The shape of a FLASH head.

    Its one layer is a Llama's, whatever the target's family is, and counts its positions by itself: a
    compressed prompt has fewer rows than the target's, and places on a picture's grid are no longer its own.

    Attributes:
        target_type: model type of the target's language model.
        target_layers: layers of the target, which tells models of one family and width apart.
        vocabulary: tokens that the target knows.
        hidden_size: of the target.
        intermediate_size: of the layer's feed-forward.
        num_attention_heads, num_key_value_heads, head_dim: of the layer's grouped-query attention.
        block: K, tokens foretold in one pass.
        offset_size: hidden width of the K transforms that tell the tokens of a block apart.
        bias_rank: rank of the bias that each token of a block has on the next; 0 for none, as published.
        compressor, compressor_options: what is made of each picture; see `mmspec.compressors`.
        rope_theta: base of the rotary frequencies.
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
    initializer_range: float = 0.02

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
        text = config.get_text_config(decoder=True)
        width, heads = int(text.hidden_size), int(text.num_attention_heads)
        groups = next(groups for groups in range(max(1, heads // 4), 0, -1) if heads % groups == 0)
        made: dict[str, Any] = {
            "target_type": text.model_type,
            "target_layers": int(text.num_hidden_layers),
            "vocabulary": vocabulary,
            "hidden_size": width,
            "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * width),
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": int(getattr(text, "head_dim", None) or width // heads),
            "offset_size": width,
            "bias_rank": min(256, width),
        }
        return cls(**made | settings)

    def layer_config(self) -> LlamaConfig:
        """The config of the decoder of one layer; it has no vocabulary of its own."""
        return LlamaConfig(
            vocab_size=1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act=self.hidden_act,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
