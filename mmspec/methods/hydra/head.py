"""Hydra's heads: MLPs that read a hidden state and the embeddings of every token chosen since.

They use the frozen embedding and, by default, the frozen output matrix of the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from mmspec.heads.configuration import LevelHeadsConfig
from mmspec.heads.layers import LlamaLayerConfig, new_blocks, one_layer
from mmspec.heads.model import FeatureHead

__all__ = ["HydraConfig", "HydraHead"]


@strict
class HydraConfig(LevelHeadsConfig, LlamaLayerConfig):
    """Config of Hydra's heads; the defaults are Hydra++ (2402.05109, section 4).

    Attributes:
        num_layers: layers of each head's MLP; the first of them reads the tokens of the path.
        prefix_attention: whether a Llama layer reads the target's hidden states, and the heads its output.
            Without it, this is plain Hydra.
    """

    model_type = "mmspec_hydra"
    least_layers = 1

    num_layers: int = 4
    prefix_attention: bool = True


class HydraMLP(nn.Module):
    """The MLP of one head: a layer that reads the path, then residual blocks."""

    def __init__(self, width: int, inputs: int, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, inputs * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.shortcut = nn.Linear(inputs * width, width)  # one initialised to the state alone trains slowly
        self.blocks = new_blocks(width, layers - 1)

    def forward(self, read: Tensor) -> Tensor:
        """[..., inputs x d] -> [..., d]."""
        deeper: Tensor = self.blocks(self.shortcut(read) + silu(linear(read, self.weight, self.bias)))
        return deeper


class HydraHead(FeatureHead):
    """Predicts each token after the root from the tokens before it (Hydra, 2402.05109, section 3).

    Row t of `forward` is the target's final hidden state at t - 1. Head i reads the state at the row of the
    root, token t, and the embeddings of the root and of the i tokens after it; it predicts token t + 1 + i.
    """

    config: HydraConfig
    config_class = HydraConfig
    base_model_prefix = "hydra"
    position_lag = None

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, range(config.num_heads)
        if config.prefix_attention:
            self.decoder = one_layer(config, norm=True)
        self.mlps = nn.ModuleList(HydraMLP(width, head + 2, config.num_layers) for head in heads)
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.vocabulary) for _ in (heads if config.own_lm_heads else ())
        )
        self.post_init()

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        return features  # the heads read the embeddings themselves

    def forward(self, rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the prefix layer; without one, return the rows unchanged."""
        return super().forward(rows, *args, **kwargs) if self.config.prefix_attention else rows

    def predict(self, hidden: Tensor, path: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits [..., V or V'] of head i, for a path of i tokens after the root.

        Args:
            hidden: [..., d] from `forward`, at the root.
            path: [..., i + 1, d] embeddings of the root and of the candidates after it.
            read_out: the target's output matrix, or its rows of `draft_tokens`.
        """
        head = path.shape[-2] - 1
        state: Tensor = self.mlps[head](torch.cat([hidden, path.flatten(-2)], -1))
        logits: Tensor = self.lm_heads[head](state) if self.lm_heads else read_out(state)
        return logits
