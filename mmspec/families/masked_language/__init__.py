"""Masked (diffusion) language models: LLaDA, Dream, SDAR, LLaDA2."""

from mmspec.families.masked_language.modeling import MASKED_MODELS
from mmspec.plugins import Family

FAMILIES = (
    Family(
        "masked_language",
        "mmspec.families.masked_language.target:MaskedTarget",
        model_types=tuple(config.model_type for config in MASKED_MODELS),
        own_code=True,
        accelerator="none",
    ),
)
