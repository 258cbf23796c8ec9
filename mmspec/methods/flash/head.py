"""The FLASH head: one layer over a compressed prompt, then K transforms that predict K hidden states.

It uses the frozen embedding and output matrix of its target. The released code never called its
semi-autoregressive head; this follows the paper (2505.12728).
"""

from __future__ import annotations

from dataclasses import field

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedConfig

from mmspec.compressors import build_compressor
from mmspec.core.indexing import take
from mmspec.errors import InputError
from mmspec.heads.layers import LlamaLayerConfig, one_layer
from mmspec.heads.model import FeatureHead, Prompts
from mmspec.open_types import Keywords
from mmspec.visual_tokens.splice import PromptRows, compress_images, splice

__all__ = ["MAX_BLOCK", "FlashConfig", "FlashHead"]

MAX_BLOCK = 16


@strict
class FlashConfig(LlamaLayerConfig):
    """Config of a FLASH head.

    Its layer counts positions by itself: a compressed prompt has fewer rows than the target's, and positions
    on an image's grid do not apply to them.

    Other block drafters are settings of this one. `compressor="identity", bias_rank=0` predicts a block from
    the prefix alone, as ParallelSpec does, with a transform for each offset instead of a trained mask token.
    With `block=2` and deeper trees it is similar to Falcon, block after block, without an LSTM and without
    glancing distillation (`falcon` of mmspec-extras has both).

    Attributes:
        block: K, tokens predicted in one forward pass.
        offset_size: hidden width of the K transforms, one for each token of a block.
        bias_rank: rank of the bias that each token of a block has on the next; 0 for none, as published.
        compressor, compressor_options: compression of each image; see `mmspec.compressors`.
        num_draft_tokens, top_k: the default tree, one block deep. `top_k=1` is a chain, which costs a third
            of a tree's operations and is best where text is easily predicted.
    """

    model_type = "mmspec_flash"

    block: int = 5
    offset_size: int = 4096
    bias_rank: int = 256
    compressor: str = "latent"
    compressor_options: Keywords = field(default_factory=dict)
    num_draft_tokens: int = 16
    top_k: int = 4

    @property
    def depth(self) -> int:
        """Depth of the default tree."""
        return self.block

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"block must be from 1 to {MAX_BLOCK} tokens; got {self.block}")
        if self.bias_rank < 0:
            raise ValueError(f"bias_rank must be at least 0 (none); got {self.bias_rank}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        width = int(text.hidden_size)
        return super().sizes_for(text, vocabulary) | {"offset_size": width, "bias_rank": min(256, width)}


class FlashHead(FeatureHead):
    """Predicts the hidden states of a token and of the K - 1 after it.

    Row t of its input holds the embedding of token t and the target's final hidden state at t - 1. Its state
    h after the layer gives, by offset i, the target's hidden state at t + i, whose logits are those of token
    t + i + 1. With offset 0 alone it is an autoregressive head with the same weights.

    Raises:
        InputError: there is no such compressor, or it outputs a summary too.
    """

    config: FlashConfig
    config_class = FlashConfig
    base_model_prefix = "flash"
    position_lag = None

    def __init__(self, config: FlashConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.compressor = build_compressor(config.compressor, width, **config.compressor_options)
        if self.compressor.summarises:
            rule = "must be one without a summary, which FLASH does not read"
            raise InputError("compressor", config.compressor, rule)
        self.decoder = one_layer(config)  # without norm: the imitated states are normed by the target
        self.up = nn.Linear(width, config.block * config.offset_size)
        self.down = nn.Parameter(torch.zeros(config.block, config.offset_size, width))
        self.bias_in = nn.Parameter(torch.randn(config.vocabulary, config.bias_rank))
        words = config.draft_size or config.vocabulary
        self.bias_out = nn.Parameter(torch.zeros(config.bias_rank, words))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if all(module is not part for part in self.compressor.modules()):  # it has its own initialisation
            super()._init_weights(module)

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        fused: Tensor = self.fc(torch.cat([embeddings, features], dim=-1))
        return fused

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts, their images compressed after the fusion."""
        rows = self.fuse(prompts.embeddings, pad(prompts.features[:, :-1], (0, 0, 1, 0)))
        asked = take(rows, prompts.questions)
        compressed = compress_images(self.compressor, rows, prompts.spans, asked)
        return splice(rows, prompts.lengths, prompts.spans, compressed)

    def predict(self, hidden: Tensor, offsets: int) -> Tensor:
        """h_i = h + MLP_i(h) for the first offsets: [..., d] -> [..., offsets, d]."""
        size = self.config.offset_size
        inner = nn.functional.linear(hidden, self.up.weight[: offsets * size], self.up.bias[: offsets * size])
        inner = nn.functional.silu(inner).unflatten(-1, (offsets, size))
        return hidden[..., None, :] + torch.einsum("...os,osd->...od", inner, self.down[:offsets])

    def bias(self, tokens: Tensor) -> Tensor:
        """Bias of a token on the logits of the next: [...] -> [..., V'] (DSpark, 2607.05147).

        The offsets of a block do not see the tokens chosen before them; the bias makes them consistent.
        """
        return embedding(tokens, self.bias_in) @ self.bias_out
