"""Hydra: Medusa's heads in sequence, each told which tokens the heads before it chose (2402.05109)."""

from mmspec.models.hydra.configuration import HydraConfig
from mmspec.models.hydra.modeling import HydraHead

__all__ = ["HydraConfig", "HydraHead"]
