"""EAGLE-3: a one-layer head on hidden states of three depths, with an output matrix of its own (2503.01840).

Importing it makes the auto classes of transformers know the folders that `mmspec train drafter` writes.
"""

from transformers import AutoConfig, AutoModel

from mmspec.models.eagle3.configuration import Eagle3Config
from mmspec.models.eagle3.modeling import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Head"]

AutoConfig.register(Eagle3Config.model_type, Eagle3Config, exist_ok=True)
AutoModel.register(Eagle3Config, Eagle3Head, exist_ok=True)
