"""The config of the head of corrected Jacobi decoding."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.head_config import WindowHeadConfig

__all__ = ["CorrectorConfig"]

NARROW, SHARE = 96, 8  # a head is as wide as an eighth of its target, but no narrower than this


@strict
class CorrectorConfig(WindowHeadConfig):
    """Config of a head that corrects stale distributions of a Jacobi window.

    Attributes:
        width: of its layers.
        num_layers, num_heads: of attention.
        context: newest committed tokens that it reads before the window.
        corrected, passes: of decoding, where nothing else is asked for.
        longest: window that it was made for; it can correct the places of no longer one.
    """

    model_type = "mmspec_cjd"
    width: int = NARROW
    num_layers: int = 2
    num_heads: int = 4
    context: int = 32
    corrected: int = 31
    passes: int = 4
    longest: int = 64

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        least = min(self.width, self.num_layers, self.num_heads, self.context, self.window, self.passes)
        if least < 1 or not 0 <= self.corrected < self.window <= self.longest:
            raise ValueError("sizes are at least 1, and corrected is below window, which is at most longest")
        if self.width % self.num_heads:
            raise ValueError(f"width ({self.width}) is a multiple of num_heads ({self.num_heads})")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of every head, and a width that suits the target."""
        width = min(int(text.hidden_size), max(NARROW, int(text.hidden_size) // SHARE))
        return super().sizes_for(text, vocabulary) | {"width": width // 8 * 8}
