"""The MTP head: norms of embedding and hidden state, their fusion, one layer of the target's family, a norm.

It uses the frozen embedding and output matrix of its target.
"""

from __future__ import annotations

import copy

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig

from mmspec.heads.layers import TargetLayerConfig, single_layer
from mmspec.heads.model import FeatureHead
from mmspec.open_types import Keywords

__all__ = ["MtpConfig", "MtpHead", "with_experts"]


@strict
class MtpConfig(TargetLayerConfig):
    """Config of a head for multi-token prediction, whose layer is of the target's own family.

    Attributes:
        num_draft_tokens, depth, top_k: the default dynamic tree.
    """

    model_type = "mmspec_mtp"

    depth: int = 5

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        sizes = super().sizes_for(text, vocabulary)
        kinds = getattr(text, "mlp_layer_types", None)
        last = int(text.num_hidden_layers) - 1
        dense = kinds[-1] == "dense" if kinds else last in (getattr(text, "mlp_only_layers", None) or ())
        return sizes | {"layer": with_experts(sizes["layer"], not dense)}


def with_experts(layer: Keywords, sparse: bool) -> Keywords:
    """Return the config of one layer, as a table, with its fields for experts set: a sparse or dense MLP."""
    words: Keywords = {
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    return layer | {word: value for word, value in words.items() if layer.get(word) is not None}


class MtpHead(FeatureHead):
    """Predicts a token from the token before it and the target's final hidden state before that.

    Row t of its input holds the embedding of token t and the target's final, normed state at t - 1; for a
    candidate, it holds the head's own state, which is normed too. The target's output matrix reads the result
    (DeepSeek-V3, 2412.19437, section 2.2). Each released layer predicts one token further than its target;
    here, as in the engines that serve them, the first layer is run again on its own states.
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
        if module is self.fc:  # norms of the target's family keep their own initialisation
            super()._init_weights(module)

    @property
    def position_lag(self) -> int | None:
        """A row has the position of its hidden state's token in the target."""
        return 1

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        both = torch.cat([self.norm_embedding(embeddings), self.norm_hidden(features)], dim=-1)
        fused: Tensor = self.fc(both)
        return fused
