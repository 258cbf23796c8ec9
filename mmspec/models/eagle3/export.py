"""Former place of the writer of EAGLE-3 heads, `mmspec.models.published.export`."""

from mmspec.models.published.export import export_head

__all__ = ["export_head"]
