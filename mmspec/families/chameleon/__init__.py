"""Chameleon: Anole and Lumina-mGPT."""

from pathlib import Path

from transformers import PreTrainedConfig

from mmspec.plugins import Converter, Family

LUMINA_CLASS = "ChameleonXLLMX"


def is_lumina(config: PreTrainedConfig) -> bool:
    """Whether a Chameleon is a Lumina-mGPT, which only its class or its folder's name shows."""
    by_class = any(name.startswith(LUMINA_CLASS) for name in config.architectures or [])
    return by_class or "lumina" in Path(config.name_or_path or "").name.lower()


FAMILIES = (
    Family(
        "lumina_mgpt",
        "mmspec.families.chameleon.target:LuminaTarget",
        model_types=("chameleon",),
        recognises=is_lumina,
        draws="tokens",
        compact=True,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.chameleon.vq:load_chameleon",
    ),
    Family(
        "chameleon",
        "mmspec.families.chameleon.target:AnoleTarget",
        converter=Converter(
            "mmspec.families.chameleon.norms:convert_chameleon",
            "mmspec.families.chameleon.norms:is_chameleon",
            {
                "control_resize": "it applies to ControlAR alone",
                "vae": "it applies to MAR alone",
                "image_size": "it is read from the config of a Chameleon",
                "num_heads": "it is read from the config of a Chameleon",
            },
        ),
        draws="tokens",
        compact=True,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.chameleon.vq:load_chameleon",
    ),
)
