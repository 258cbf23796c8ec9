"""Former place of the reader of published EAGLE-3 heads, `mmspec.models.published.eagle3`."""

from mmspec.models.published.eagle3 import read_eagle3 as read_official

__all__ = ["read_official"]
