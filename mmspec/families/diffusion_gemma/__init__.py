"""DiffusionGemma, a text diffusion model that denoises blocks of tokens (canvases)."""

from mmspec.plugins import Family

MODEL_TYPE = "diffusion_gemma"
FAMILIES = (
    Family(MODEL_TYPE, "mmspec.families.diffusion_gemma.target:DiffusionGemmaTarget", accelerator="none"),
)
