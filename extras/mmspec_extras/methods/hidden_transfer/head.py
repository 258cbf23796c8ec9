"""Maps of Hidden Transfer (2404.12022): from the state of a token to pseudo states of the places after it."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig

from mmspec.heads.configuration import check_taps
from mmspec.heads.model import DraftingHead
from mmspec.methods.ppd.head import PromptTokensConfig
from mmspec.open_types import Keywords


@strict
class HiddenTransferConfig(PromptTokensConfig):
    """Config of maps of hidden states; `num_probes` is their number.

    Attributes:
        layer: layer of the target that the pseudo states enter.
    """

    model_type = "mmspec_hidden_transfer"

    layer: int = 1

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        return super().sizes_for(text, vocabulary) | {"layer": int(text.num_hidden_layers) // 2}

    def validate_layer(self) -> None:
        """Raise ValueError for a layer that the target does not have; called by `strict`."""
        check_taps([self.layer], self.target_layers)
        if self.layer < 0:
            raise ValueError(f"layer must be 0 or more; got {self.layer}")


class HiddenTransfer(DraftingHead):
    """K linear maps of the state h of a token, as it enters the layer: W_i h + b_i.

    The maps begin as identities.

    Attributes:
        weight: [K, d, d].
        embeddings: [K, d] the b_i, also the embeddings of the pseudo tokens below the layer, for no reader.
    """

    config: HiddenTransferConfig
    config_class = HiddenTransferConfig
    base_model_prefix = "hidden_transfer"

    def __init__(self, config: HiddenTransferConfig) -> None:
        super().__init__(config)
        count, size = config.num_probes, config.hidden_size
        self.weight = nn.Parameter(torch.eye(size).repeat(count, 1, 1))
        self.embeddings = nn.Parameter(torch.zeros(count, size))
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.layer,)

    def forward(self, states: Tensor) -> Tensor:
        """Map states [..., d] that enter the layer to pseudo states [..., K, d]."""
        mapped = torch.einsum("kde,...e->...kd", self.weight, states.to(self.dtype))
        return (mapped + self.embeddings).to(states.dtype)
