"""LlamaGen: a Llama over image tokens in raster order (Sun et al., 2406.06525).

Importing it registers the folders that `mmspec convert` writes with the auto classes of transformers.
"""

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.plugins import Converter, Family


def kin(model: type[LlamaGenForCausalLM], target: str, **record: Any) -> Family:
    """Register the models of a LlamaGen-like family with transformers, and return its record.

    Args:
        model: LlamaGen, or a class built from its parts.
        target, record: fields of `Family`; these families have the others in common.
    """
    config, decoder = model.config_class, model.decoder_class
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, decoder, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    shared = {
        "vq": "diffusers.models.autoencoders.vq_model:VQModel",
        "load": "mmspec.families.llamagen.parts:load_llamagen",
        "reader": "mmspec.families.llamagen.parts:PromptReader",
    }
    return Family(config.model_type, target, draws="tokens", answers=False, **{**shared, **record})


FAMILIES = (
    kin(
        LlamaGenForCausalLM,
        "mmspec.families.llamagen.target:LlamaGenTarget",
        converter=Converter(
            "mmspec.families.llamagen.conversion:convert_checkpoint",
            refuses={"vae": "it applies to MAR alone"},
        ),
        generate="mmspec.families.llamagen.generation:generate_keywords",
    ),
)
