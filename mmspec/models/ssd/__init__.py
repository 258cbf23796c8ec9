"""The head of vertical drafts: it predicts an image token from the target's states in the row above."""

from mmspec.models.ssd.configuration import VerticalConfig
from mmspec.models.ssd.modeling import VerticalHead

__all__ = ["VerticalConfig", "VerticalHead"]
