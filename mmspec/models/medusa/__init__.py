"""Medusa: heads that each predict one of the next tokens, all from one hidden state (2401.10774)."""

from mmspec.models.medusa.configuration import MedusaConfig
from mmspec.models.medusa.modeling import MedusaHead

__all__ = ["MedusaConfig", "MedusaHead"]
