"""The EAGLE head with the seams of any transformers decoder: Cache, 4-D mask, position_ids.

It has no embedding and no output matrix: those are its target's, frozen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModel, Emu3TextConfig, PreTrainedModel
from transformers.models.emu3.modeling_emu3 import Emu3TextModel

from mmspec.compressors.spans import PictureSpan
from mmspec.errors import UnsupportedModelError
from mmspec.models.eagle.configuration import EagleConfig
from mmspec.models.feature_head import FeatureHead, PromptRows

__all__ = ["EagleHead"]

AutoModel.register(Emu3TextConfig, Emu3TextModel, exist_ok=True)  # transformers leaves this one out


class EagleHead(FeatureHead):
    """Foretells the hidden state of a token from the token and the hidden state before it.

    Row t of its input holds the embedding of token t and the target's final hidden state at t - 1; its
    output imitates the target's at t. The one layer is followed by no norm, because what is imitated has
    passed one; it keeps its norm in front, which EAGLE's release left out (vlm-drafting.md, section 3).
    """

    config: EagleConfig
    config_class = EagleConfig
    base_model_prefix = "eagle"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.decoder = single_layer(config)
        self.post_init()

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        fused: Tensor = self.fc(torch.cat([embeddings, features], dim=-1))
        return fused

    def read_prompts(
        self,
        embeddings: Tensor,
        features: Tensor,
        lengths: Sequence[int],
        spans: Sequence[Sequence[PictureSpan]],
        questions: Tensor,
    ) -> PromptRows:
        rows = self.fuse(embeddings[:, 1:], features[:, :-1])  # nothing comes before the first token
        slot = torch.arange(1, embeddings.shape[1], device=rows.device).expand(len(rows), -1)
        within = slot < torch.tensor(lengths, device=rows.device)[:, None]
        return PromptRows(rows, [length - 1 for length in lengths], slot.where(within, -1), slot)


def single_layer(config: EagleConfig) -> PreTrainedModel:
    """A decoder of the target's family whose only weights are those of one layer.

    Raises:
        UnsupportedModelError: the family's decoder is not a stack of `layers`.
    """
    decoder: PreTrainedModel = AutoModel.from_config(config.layer_config())
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} keeps its layers where no EAGLE head can be cut"
        )
    for name, child in list(decoder.named_children()):
        if name != "layers" and any(True for _ in child.parameters()):
            setattr(decoder, name, nn.Identity())  # embeddings and last norm are the target's
    return decoder
