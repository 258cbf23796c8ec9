"""Decoding of canvases of noise (DiffusionGemma, 2505.24857)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "renoise",
        "denoises a canvas (DiffusionGemma) in at most `denoising_steps` steps",
        "2505.24857",
        drafter="mmspec.families.diffusion_gemma.canvas:NoiseCanvasDrafter",
        make="mmspec.methods.renoise.drafter:renoise",
        rules={"renoise": "mmspec.families.diffusion_gemma.renoise:Renoise"},
    ),
)
