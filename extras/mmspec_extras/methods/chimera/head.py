"""The head of Chimera (2402.15758): a trigram encoder, a full-context encoder and residual decoders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import pad

from mmspec.heads.layers import new_blocks
from mmspec.heads.model import Prompts
from mmspec.methods.hydra.head import HydraConfig, HydraHead, HydraMLP
from mmspec.visual_tokens.splice import PromptRows

GRAM = 3  # tokens that the trigram encoder reads


@strict
class ChimeraConfig(HydraConfig):
    """Config of a Chimera head; `num_layers` are those of each residual decoder."""

    model_type = "mmspec_chimera"

    num_layers: int = 1

    def validate_prefix_attention(self) -> None:
        """Raise ValueError without the full-context encoder; called by `strict`."""
        if not self.prefix_attention:
            raise ValueError("prefix_attention must be True: it is the full-context encoder; got False")


class ChimeraHead(HydraHead):
    """Predicts the token after a candidate from its trigram and the target's states before the root.

    The full-context encoder, one layer, reads the target's final hidden states of committed tokens, and in
    place of those that do not exist yet, of the root and the candidates after it, encodings of trigrams.
    """

    config: ChimeraConfig
    config_class = ChimeraConfig
    base_model_prefix = "chimera"

    def __init__(self, config: ChimeraConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.mlps = nn.ModuleList(HydraMLP(width, 2, config.num_layers) for _ in range(config.num_heads))
        self.blocks = new_blocks(GRAM * width, 1)
        self.trigram = nn.Linear(GRAM * width, width, bias=False)
        self.post_init()

    def encode(self, grams: Tensor) -> Tensor:
        """Encode trigrams [..., 3, d], newest last: rows [..., d] of the full-context encoder."""
        rows: Tensor = self.trigram(self.blocks(grams.flatten(-2)))
        return rows

    def read_prompts(self, prompts: Prompts) -> PromptRows:
        """Make the rows of whole prompts; `summary` [B, 2, d] are embeddings of the two newest tokens."""
        made = super().read_prompts(prompts)
        before = pad(prompts.embeddings, (0, 0, GRAM - 1, 0))
        newest = [
            row[length : length + GRAM - 1] for row, length in zip(before, prompts.lengths, strict=True)
        ]
        return PromptRows(made.rows, made.lengths, made.source, made.slot, torch.stack(newest))

    def decode(
        self, state: Tensor, fused: Tensor, level: int, read_out: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Logits [..., V or V'] of a level from the encoder's outputs [..., d].

        Args:
            state: [..., d] the target's before the root.
            fused: [..., d] the full-context encoder's at the root or a candidate.
            level: number of candidates from the root to it.
            read_out: see `predict`.
        """
        decoded: Tensor = self.mlps[level](torch.cat([state.expand_as(fused), fused], -1))
        logits: Tensor = self.lm_heads[level](decoded) if self.lm_heads else read_out(decoded)
        return logits
