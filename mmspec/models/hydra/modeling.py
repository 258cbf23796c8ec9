"""Hydra's heads: MLPs that read a hidden state and the embeddings of every token chosen since.

They have no embedding, and by default no output matrix: those are their target's, frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaModel
from transformers import initialization as init

from mmspec.compressors.spans import PictureSpan
from mmspec.models.feature_head import FeatureHead, PromptRows
from mmspec.models.hydra.configuration import HydraConfig
from mmspec.models.llama_layer import layer_config

__all__ = ["HydraHead"]


class HydraHead(FeatureHead):
    """Foretells the hidden states that say the tokens after the root (Hydra, 2402.05109, section 3).

    Row t of `forward` is the target's final hidden state at t - 1. Head i reads the state at the row of the
    root, token t, and the embeddings of the root and of the i tokens after it; it foretells token t + 1 + i.
    New heads change nothing of the state, so each begins with what it says by itself.
    """

    config: HydraConfig
    config_class = HydraConfig
    base_model_prefix = "hydra"
    counts_rows = True

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, range(config.num_heads)
        self.decoder = LlamaModel(layer_config(config)) if config.prefix_attention else None
        if self.decoder is not None:
            self.decoder.embed_tokens = nn.Identity()
        self.shortcuts = nn.ModuleList(nn.Linear((index + 2) * width, width) for index in heads)
        # layers of its own for each head: the released code repeats one object
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(width if layer else (index + 2) * width, width)
                for layer in range(config.num_layers)
            )
            for index in heads
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.vocabulary) for _ in (heads if config.own_lm_heads else ())
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module in set(self.shortcuts):
            init.eye_(module.weight)  # the state comes first in what they read
        elif any(module in set(blocks) for blocks in self.blocks):
            init.zeros_(module.weight)

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        return features  # what the token is, the heads are told

    def read_prompts(
        self,
        embeddings: Tensor,
        features: Tensor,
        lengths: Sequence[int],
        spans: Sequence[Sequence[PictureSpan]],
        questions: Tensor,
    ) -> PromptRows:
        places = torch.arange(1, features.shape[1], device=features.device).expand(len(lengths), -1)
        source = places.masked_fill(places >= torch.tensor(lengths, device=places.device)[:, None], -1)
        return PromptRows(features[:, :-1], [length - 1 for length in lengths], source, places)

    def foretell(self, hidden: Tensor, path: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """What the head says that is as far along as the path.

        Args:
            hidden: [..., d] from `forward`, at the root.
            path: [..., i + 1, d] embeddings of the root and of the candidates after it.
            read_out: the target's output matrix, hidden states [..., d] -> logits [..., V].

        Returns:
            [..., V] logits of head i.
        """
        head = path.shape[-2] - 1
        read = torch.cat([hidden, path.flatten(-2)], -1)
        first, *others = self.blocks[head]
        state: Tensor = self.shortcuts[head](read) + silu(first(read))
        for block in others:
            state = state + silu(block(state))
        logits: Tensor = self.lm_heads[head](state) if self.lm_heads else read_out(state)
        return logits
