"""The MTP head: norms of embedding and hidden state, their fusion, one layer of the target's family, a norm.

It has no embedding and no output matrix: those are its target's, frozen.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mmspec.models.feature_head import FeatureHead
from mmspec.models.mtp.configuration import MtpConfig
from mmspec.models.target_layer import single_layer

__all__ = ["MtpHead"]


class MtpHead(FeatureHead):
    """Predicts a token from the token before it and the target's final hidden state before that.

    Row t of its input holds the embedding of token t and the target's final, normed state at t - 1; or, of a
    candidate, the head's own state, which is normed too. The target's output matrix reads it (DeepSeek-V3,
    2412.19437, section 2.2). The released layers predict one token further than their target; here, as in
    the engines that serve them, the layer goes on from its own states.
    """

    config: MtpConfig
    config_class = MtpConfig
    base_model_prefix = "mtp"

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.decoder = single_layer(config.layer_config(), norm="norm")
        last = self.decoder.get_submodule("norm")
        self.norm_embedding, self.norm_hidden = copy.deepcopy(last), copy.deepcopy(last)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.fc:  # norms of the target's family begin as they were built
            super()._init_weights(module)

    @property
    def position_lag(self) -> int | None:
        """A row stands where the target has the token that its hidden state is of."""
        return 1

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        both = torch.cat([self.norm_embedding(embeddings), self.norm_hidden(features)], dim=-1)
        fused: Tensor = self.fc(both)
        return fused
