"""The config of an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.feature_head import HIDDEN
from mmspec.models.llama_layer import LlamaLayerConfig

__all__ = ["Eagle3Config", "three_taps"]

DRAFT_VOCABULARY = 32000  # the published heads'
LARGE = 2 * DRAFT_VOCABULARY  # below, the few tokens that a map would save are not worth missing
SHALLOWEST = 7  # layers of a target whose published taps differ


@strict
class Eagle3Config(LlamaLayerConfig):
    """Config of an EAGLE-3 head.

    Attributes:
        taps: hidden states of the target that are read: k for what enters layer k, -1 for the final one.
        draft_vocabulary: tokens that the head knows, at most those of the target.
        norm_before_residual: whether the layer adds to the normed feature, as most heads of speculators do,
            instead of to the feature as it is.
        depth: of the dynamic tree that is grown where nothing else is asked for.
    """

    model_type = "mmspec_eagle3"

    taps: list[int] = field(default_factory=lambda: [2, 16, 29])
    draft_vocabulary: int = 0
    norm_before_residual: bool = False
    depth: int = 5

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if not 0 <= self.draft_vocabulary <= self.vocabulary:
            raise ValueError(
                f"draft_vocabulary: got {self.draft_vocabulary}; at most {self.vocabulary}, the vocabulary"
            )
        deepest = self.target_layers - 1 if self.target_layers else max(self.taps, default=0)
        if not self.taps or any(not HIDDEN <= tap <= deepest for tap in self.taps):
            raise ValueError(f"taps: got {self.taps}; from -1 to {deepest}")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of a head with a layer, its taps, and a vocabulary, reduced where it is large."""
        known = DRAFT_VOCABULARY if vocabulary > LARGE else vocabulary
        taps = three_taps(int(text.num_hidden_layers))
        return super().sizes_for(text, vocabulary) | {"taps": taps, "draft_vocabulary": known}


def three_taps(layers: int) -> list[int]:
    """Taps of a target of L layers: what enters layers 2, L // 2 and L - 3, as published.

    Where these are not three (fewer than 7 layers), the last three states are read, the final one included;
    a target of one layer has two.
    """
    if layers >= SHALLOWEST:
        return [2, layers // 2, layers - 3]
    return [*range(layers), HIDDEN][-3:]
