"""SmolLM2, whose weights a package has, and the models around it that were saved without it."""

from mmspec.plugins import Family

FAMILIES = (
    Family(
        "smollm2",
        "mmspec.targets.causal:CausalTarget",
        model_types=(),
        complete="mmspec.families.smollm2.language_model:complete",
    ),
)
