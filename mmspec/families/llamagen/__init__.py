"""LlamaGen: a Llama over image tokens, drawn in raster order (Sun et al., 2406.06525).

Importing it makes the auto classes of transformers know the folders that `mmspec convert` writes.
"""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.plugins import Converter, Family


def kin(model: type[LlamaGenForCausalLM], target: str, **record: Any) -> Family:
    """Register the models of a family with transformers, and make its record.

    Args:
        model: a LlamaGen, or of a class that is made of its parts.
        target, record: as of `Family`, but for what LlamaGen has in common with its kin.
    """
    config, decoder = model.config_class, model.decoder_class
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, decoder, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    shared = {
        "vq": "diffusers.models.autoencoders.vq_model:VQModel",
        "load": "mmspec.families.llamagen.parts:load_llamagen",
    }
    return Family(config.model_type, target, draws="tokens", answers=False, **{**shared, **record})


FAMILIES = (
    kin(
        LlamaGenForCausalLM,
        "mmspec.families.llamagen.target:LlamaGenTarget",
        converter=Converter(
            "mmspec.families.llamagen.conversion:convert_checkpoint", refuses={"vae": "it goes with a MAR"}
        ),
        generate="mmspec.families.llamagen.generation:generate_keywords",
    ),
)
