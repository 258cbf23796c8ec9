"""DiffusionGemma, a model of canvases of noise."""

from mmspec.plugins import Family

FAMILIES = (
    Family(
        "diffusion_gemma", "mmspec.families.diffusion_gemma.target:DiffusionGemmaTarget", accelerator="none"
    ),
)
