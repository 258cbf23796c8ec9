"""FLASH: a draft head that reads compressed images and predicts several tokens in a pass (2505.12728).

Importing it makes the auto classes of transformers know the folders that `mmspec train drafter` writes.
"""

from transformers import AutoConfig, AutoModel

from mmspec.models.flash.configuration import FlashConfig
from mmspec.models.flash.modeling import FlashHead

__all__ = ["FlashConfig", "FlashHead"]

AutoConfig.register(FlashConfig.model_type, FlashConfig, exist_ok=True)
AutoModel.register(FlashConfig, FlashHead, exist_ok=True)
