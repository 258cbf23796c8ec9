"""The config of a FLASH head."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.llama_layer import LlamaLayerConfig

__all__ = ["MAX_BLOCK", "FlashConfig"]

MAX_BLOCK = 16


@strict
class FlashConfig(LlamaLayerConfig):
    """Config of a FLASH head.

    Its layer counts positions by itself: a compressed prompt has fewer rows than the target's, and places on
    an image's grid are no longer its own.

    Other drafters of blocks are settings of this one. `compressor="identity", bias_rank=0` predicts a block
    from the prefix alone, as ParallelSpec does, with a transform for each offset instead of a trained mask
    token. With `block=2` and trees deeper than that it has Falcon's shape, block after block, with a fusion
    of each position instead of an LSTM, whose state would leak from sibling to sibling; without its glancing
    distillation.

    Attributes:
        block: K, tokens predicted in one pass.
        offset_size: hidden width of the K transforms that tell the tokens of a block apart.
        bias_rank: rank of the bias that each token of a block has on the next; 0 for none, as published.
        compressor, compressor_options: what is made of each image; see `mmspec.compressors`.
        num_draft_tokens, top_k: the tree where nothing else is asked for, one block deep. `top_k=1` is a
            chain, which costs a third of a tree's operations and is best where text is easily predicted.
    """

    model_type = "mmspec_flash"

    block: int = 5
    offset_size: int = 4096
    bias_rank: int = 256
    compressor: str = "latent"
    compressor_options: dict[str, Any] = field(default_factory=dict)
    num_draft_tokens: int = 16
    top_k: int = 4

    @property
    def depth(self) -> int:
        """Depth of the tree that is grown where nothing else is asked for."""
        return self.block

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"block: got {self.block}; 1 to {MAX_BLOCK} tokens in a pass")
        if self.bias_rank < 0:
            raise ValueError(f"bias_rank: got {self.bias_rank}; 0 (none) or more")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        width = int(text.hidden_size)
        return super().sizes_for(text, vocabulary) | {"offset_size": width, "bias_rank": min(256, width)}
