"""DiffusionGemma, a model of canvases of noise."""

from mmspec.plugins import Family

MODEL_TYPE = "diffusion_gemma"
FAMILIES = (
    Family(MODEL_TYPE, "mmspec.families.diffusion_gemma.target:DiffusionGemmaTarget", accelerator="none"),
)
