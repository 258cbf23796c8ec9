"""EAGLE: a one-layer head that predicts a target's next hidden state (Li et al., 2401.15077)."""

from mmspec.models.eagle.configuration import EagleConfig
from mmspec.models.eagle.modeling import EagleHead

__all__ = ["EagleConfig", "EagleHead"]
