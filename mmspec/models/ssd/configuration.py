"""The config of the head of vertical drafts."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from mmspec.models.head_config import WindowHeadConfig

__all__ = ["VerticalConfig"]

NARROW, SHARE = 192, 4  # a head is as wide as a quarter of its target, but no narrower than this


@strict
class VerticalConfig(WindowHeadConfig):
    """Config of a head that predicts the token below a cell.

    Attributes:
        width: of its inner layer.
    """

    model_type = "mmspec_ssd"
    width: int = NARROW

    def validate_architecture(self) -> None:
        """Refuse what cannot be built; called by `strict`."""
        if min(self.width, self.window) < 1:
            raise ValueError(f"width ({self.width}) and window ({self.window}) are at least 1")

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> dict[str, Any]:
        """Attributes of every head, and a width that suits the target."""
        width = max(NARROW, int(text.hidden_size) // SHARE)
        return super().sizes_for(text, vocabulary) | {"width": width}
