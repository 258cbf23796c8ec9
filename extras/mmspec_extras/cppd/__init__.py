"""CPPD (2307.12270): reads the characters of a text line in one forward pass."""

from mmspec_extras.cppd.modeling import CPPD, CPPDConfig

__all__ = ["CPPD", "CPPDConfig"]
