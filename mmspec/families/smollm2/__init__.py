"""SmolLM2, whose weights are in a Python package, and vision-language models saved without it."""

from mmspec.plugins import Family

FAMILIES = (
    Family(
        "smollm2",
        "mmspec.targets.causal:CausalTarget",
        model_types=(),
        complete="mmspec.families.smollm2.language_model:complete",
    ),
)
