"""EAGLE-3: a one-layer head on hidden states of three depths, with its own output matrix (2503.01840)."""

from mmspec.models.eagle3.configuration import Eagle3Config
from mmspec.models.eagle3.modeling import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Head"]
