"""The config of an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.feature_head import HIDDEN
from mmspec.models.published_layer import SLIDING, PublishedLayerConfig

__all__ = ["Eagle3Config", "three_taps"]

DRAFT_VOCABULARY = 32000  # the published heads'
LARGE = 2 * DRAFT_VOCABULARY  # below, the few tokens that a map would save are not worth missing
AXES = 3  # of M-RoPE: time, height, width
SHALLOWEST = 7  # layers of a target whose published taps differ


@strict
class Eagle3Config(PublishedLayerConfig):
    """Config of an EAGLE-3 head.

    Attributes:
        taps: hidden states of the target that are read: k for what enters layer k, -1 for the final one.
        draft_vocabulary: tokens that the head knows, at most those of the target.
        norm_before_residual: whether the layer adds to the normed feature, as most heads of speculators do,
            instead of to the feature as it is.
        norm_before_fc: whether the target's states are normed together before they are brought to one width
            (EAGLE-3.1).
        fc_norm: whether each of them is normed by itself.
        norm_feedback: whether the state that the head goes on from is normed.
        norm_logits: whether what its output matrix reads is normed.
        qk_norm: whether queries and keys are normed, as in Qwen3.
        mrope_section: frequencies that turn with the time, height and width of a position, as the target's
            (M-RoPE); None for positions of one axis, which count the head's rows.
        mrope_interleaved: whether these take turns (Qwen3-VL) instead of following one another (Qwen2-VL).
        depth: of the dynamic tree that is grown where nothing else is asked for.
    """

    model_type = "mmspec_eagle3"

    taps: list[int] = field(default_factory=lambda: [2, 16, 29])
    draft_vocabulary: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_feedback: bool = False
    norm_logits: bool = True
    qk_norm: bool = False
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False
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
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("fc_norm: got True; False beside norm_before_fc, which norms the same states")
        section, half = self.mrope_section, self.rotary_dim // 2
        if section is not None and (len(section) != AXES or min(section) < 0 or sum(section) != half):
            raise ValueError(f"mrope_section: got {section}; {AXES} numbers that add up to {half}")
        if section is not None and self.rotary.get("rope_type", "default") != "default":
            raise ValueError(f"rotary: got {self.rotary}; positions of several axes are not scaled")

    def layer_settings(self) -> dict[str, Any]:
        windows = {"layer_types": [SLIDING], "sliding_window": self.sliding_window}
        return super().layer_settings() | ({} if self.sliding_window is None else windows)

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of a head with a layer, its taps, and a vocabulary, reduced where it is large.

        Positions have several axes where the target's have, and turn all numbers of its heads.
        """
        known = DRAFT_VOCABULARY if vocabulary > LARGE else vocabulary
        taps = three_taps(int(text.num_hidden_layers))
        sizes = super().sizes_for(text, vocabulary) | {"taps": taps, "draft_vocabulary": known}
        rope = getattr(text, "rope_parameters", None) or {}
        section = rope.get("mrope_section")
        if section is not None and 2 * sum(section) == sizes["head_dim"]:
            sizes |= {"mrope_section": list(section), "rope_theta": float(rope["rope_theta"])}
            sizes["mrope_interleaved"] = bool(rope.get("mrope_interleaved", False))
        return sizes


def three_taps(layers: int) -> list[int]:
    """Taps of a target of L layers: what enters layers 2, L // 2 and L - 3, as published.

    Where these are not three (fewer than 7 layers), it is what enters the last three. The final state is not
    among them: engines that serve such heads cannot hand it over.
    """
    return [2, layers // 2, layers - 3] if layers >= SHALLOWEST else [*range(layers)][-3:]
