"""Hydra: Medusa's heads in sequence, each told which tokens the heads before it chose (2402.05109).

Importing it makes the auto classes of transformers know the folders that `mmspec train drafter` writes.
"""

from transformers import AutoConfig, AutoModel

from mmspec.models.hydra.configuration import HydraConfig
from mmspec.models.hydra.modeling import HydraHead

__all__ = ["HydraConfig", "HydraHead"]

AutoConfig.register(HydraConfig.model_type, HydraConfig, exist_ok=True)
AutoModel.register(HydraConfig, HydraHead, exist_ok=True)
