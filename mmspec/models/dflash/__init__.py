"""DFlash and DSpark: heads that denoise a block of tokens in one pass (2602.06036, 2607.05147)."""

from mmspec.models.dflash.configuration import DFlashConfig, DSparkConfig
from mmspec.models.dflash.modeling import DFlashHead, DSparkHead

__all__ = ["DFlashConfig", "DFlashHead", "DSparkConfig", "DSparkHead"]
