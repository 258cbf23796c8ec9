"""Schedules: which cells of an image are decoded together."""

from mmspec.decoding.parallel import Schedule
from mmspec.registry import Registry

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES: Registry[type[Schedule]] = Registry(
    "schedule", {"staircase": "mmspec.decoding_orders.staircase:Staircase"}
)
