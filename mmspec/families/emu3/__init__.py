"""Emu3 and Emu3.5; importing it registers Emu3.5 with the auto classes of transformers."""

import mmspec.families.emu3.emu3_5  # noqa: F401
from mmspec.plugins import Family

FAMILIES = (
    Family("emu3", "mmspec.families.emu3.target:Emu3Target", draws="tokens"),
    Family(
        "emu3_5",
        "mmspec.families.emu3.target:Emu3p5Target",
        model_types=("Emu3",),
        own_code=True,
        draws="tokens",
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.chameleon.vq:load_chameleon",
    ),
)
