"""GEAR (2403.05527): a target whose KV cache is compressed."""

from mmspec_extras.gear.packing import Packing
from mmspec_extras.gear.target import compressed

__all__ = ["Packing", "compressed"]
