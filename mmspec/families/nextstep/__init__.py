"""NextStep-1: text and continuous image tokens in one causal transformer (2508.10711)."""

from transformers import AutoConfig, AutoModel

from mmspec.families.nextstep.modeling import NextStepConfig, NextStepForImageGeneration
from mmspec.plugins import Family

AutoConfig.register(NextStepConfig.model_type, NextStepConfig, exist_ok=True)
AutoModel.register(NextStepConfig, NextStepForImageGeneration, exist_ok=True)

FAMILIES = (
    Family(
        "nextstep",
        "mmspec.families.nextstep.target:NextStepTarget",
        own_code=True,
        draws="vectors",
        answers=False,
        load="mmspec.families.nextstep.loading:load_parts",
    ),
)
