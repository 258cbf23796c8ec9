"""Medusa: heads that each predict one of the next tokens, all from one hidden state (2401.10774).

Importing it makes the auto classes of transformers know the folders that `mmspec train drafter` writes.
"""

from transformers import AutoConfig, AutoModel

from mmspec.models.medusa.configuration import MedusaConfig
from mmspec.models.medusa.modeling import MedusaHead

__all__ = ["MedusaConfig", "MedusaHead"]

AutoConfig.register(MedusaConfig.model_type, MedusaConfig, exist_ok=True)
AutoModel.register(MedusaConfig, MedusaHead, exist_ok=True)
