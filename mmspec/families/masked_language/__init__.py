"""Masked language models: LLaDA, Dream, SDAR, LLaDA2."""

from mmspec.plugins import Family

FAMILIES = (
    Family(
        "masked_language",
        "mmspec.families.masked_language.target:MaskedTarget",
        model_types=("llada", "sdar", "Dream", "llada2_moe"),
        accelerator="none",
    ),
)
