"""Former place of the reader of MTP layers, `mmspec.models.published.mtp`."""

from mmspec.models.published.mtp import read_mtp as read_official

__all__ = ["read_official"]
