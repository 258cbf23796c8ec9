"""Decoding orders: which cells of an image are decoded together."""

from mmspec.decoding.parallel import DecodingOrder
from mmspec.registry import Registry

__all__ = ["DECODING_ORDERS", "DecodingOrder"]

DECODING_ORDERS: Registry[type[DecodingOrder]] = Registry(
    "decoding order", {"staircase": "mmspec.decoding_orders.staircase:Staircase"}
)
