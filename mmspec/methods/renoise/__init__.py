"""Canvases of noise (DiffusionGemma, 2505.24857)."""

from mmspec.plugins import Method

METHODS = (
    Method(
        "renoise",
        "nothing: a model of canvases of noise (DiffusionGemma) keeps what is sure in each of at most "
        "`denoising_steps` steps, by `entropy_bound`",
        "2505.24857",
        make="mmspec.methods.renoise.drafter:renoise",
        rules={"renoise": "mmspec.families.diffusion_gemma.renoise:Renoise"},
    ),
)
