"""MTP: the layer for multi-token prediction that a target was trained with (DeepSeek-V3, 2412.19437)."""

from mmspec.models.mtp.configuration import MtpConfig
from mmspec.models.mtp.modeling import MtpHead

__all__ = ["MtpConfig", "MtpHead"]
