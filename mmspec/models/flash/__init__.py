"""FLASH: a draft head that reads compressed images and predicts several tokens in a pass (2505.12728)."""

from mmspec.models.flash.configuration import FlashConfig
from mmspec.models.flash.modeling import FlashHead

__all__ = ["FlashConfig", "FlashHead"]
