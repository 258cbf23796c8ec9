"""EAGLE: a one-layer head that predicts a target's next hidden state (Li et al., 2401.15077).

Importing it makes the auto classes of transformers know the folders that `mmspec train drafter` writes.
"""

from transformers import AutoConfig, AutoModel

from mmspec.models.eagle.configuration import EagleConfig
from mmspec.models.eagle.modeling import EagleHead

__all__ = ["EagleConfig", "EagleHead"]

AutoConfig.register(EagleConfig.model_type, EagleConfig, exist_ok=True)
AutoModel.register(EagleConfig, EagleHead, exist_ok=True)
