"""The head of corrected Jacobi decoding: it corrects what the target said about places ahead."""

from mmspec.models.cjd.configuration import CorrectorConfig
from mmspec.models.cjd.modeling import CorrectorHead, Memory

__all__ = ["CorrectorConfig", "CorrectorHead", "Memory"]
