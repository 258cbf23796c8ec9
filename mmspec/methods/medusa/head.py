"""Medusa's heads: a few residual blocks each, on the target's last hidden state.

They have no embedding, and by default use the frozen output matrix of the target. Heads of a speech
recogniser may attend to the states of its encoder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig

from mmspec.heads.configuration import LevelHeadsConfig
from mmspec.heads.encoder_attention import EncoderAttention
from mmspec.heads.layers import new_blocks
from mmspec.heads.model import HIDDEN, DraftingHead
from mmspec.open_types import Keywords

__all__ = ["MedusaConfig", "MedusaHead"]


@strict
class MedusaConfig(LevelHeadsConfig):
    """Config of Medusa's heads.

    Attributes:
        num_layers: residual blocks of each head. Without `own_lm_heads`, a linear map [d, d] follows them,
            before the target's output matrix.
        merged_states: number of states of the target's encoder that are averaged into one, for heads that
            attend to them in place of blocks; 0 for heads that do not.
        num_attention_heads, intermediate_size: of heads that do.
    """

    model_type = "mmspec_medusa"

    merged_states: int = 0
    num_attention_heads: int = 1
    intermediate_size: int = 0

    @property
    def taps(self) -> list[int]:
        """Hidden states of the target that the heads read."""
        return [self.target_layers - 1, HIDDEN] if self.merged_states else [HIDDEN]

    @property
    def listens(self) -> bool:
        """Whether the heads attend to the states of the target's encoder."""
        return self.merged_states > 0

    def validate_merged_states(self) -> None:
        """Raise ValueError for a number that cannot be built; called by `strict`."""
        if self.merged_states < 0 or self.listens and self.own_lm_heads:
            rule = "must be at least 0, and 0 with own_lm_heads"
            raise ValueError(f"merged_states {rule}; got {self.merged_states}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        heads, width = int(text.num_attention_heads), int(text.hidden_size)
        inner = (
            getattr(text, "decoder_ffn_dim", None) or getattr(text, "intermediate_size", None) or 4 * width
        )
        sizes = {"num_attention_heads": heads, "intermediate_size": int(inner)}
        return super().sizes_for(text, vocabulary) | sizes


class MedusaHead(DraftingHead):
    """Predicts a hidden state for each token after the root (Medusa, 2401.10774, section 3.1).

    Head i reads the target's final hidden state at t and predicts token t + 2 + i; token t + 1, the root, is
    the target's own. Where heads share the target's output matrix, each has a linear map in front of it.
    x + SiLU(W x) can add to a state but hardly subtract from it, so that without a map, or with one that
    begins as the identity, heads keep predicting the root for long.

    Attributes:
        listener: the layer of heads that attend to an encoder's states, which replaces blocks and maps.
    """

    config: MedusaConfig
    config_class = MedusaConfig
    base_model_prefix = "medusa"
    main_input_name = "hidden"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, range(config.num_heads)
        if config.listens:
            sizes = config.num_heads, config.num_attention_heads, config.intermediate_size
            self.listener = EncoderAttention(width, *sizes, config.merged_states)
        plain = () if config.listens else heads
        self.blocks = nn.ModuleList(new_blocks(width, config.num_layers) for _ in plain)
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in (() if config.own_lm_heads else plain))
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.vocabulary, bias=False) for _ in (heads if config.own_lm_heads else ())
        )
        self.post_init()

    def forward(self, hidden: Tensor, heads: int) -> Tensor:
        """Predict with the first `heads` heads: hidden states [..., d] -> [..., heads, d]."""
        states = [blocks(hidden) for blocks in self.blocks[:heads]]
        if self.maps:
            states = [self.maps[head](state) for head, state in enumerate(states)]
        return torch.stack(states, -2)

    def logits(self, predicted: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., heads, V or V'] of the first heads' states [..., heads, d]."""
        if not self.lm_heads:
            return read_out(predicted)
        states = enumerate(predicted.unbind(-2))
        return torch.stack([self.lm_heads[head](state) for head, state in states], -2)
