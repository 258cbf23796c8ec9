"""LlamaGen: a Llama over image tokens, drawn in raster order (Sun et al., 2406.06525).

Importing it makes the auto classes of transformers know the folders that `mmspec convert` writes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.llamagen.configuration import CONTROLLED_LAYERS, SIZES, LlamaGenConfig
from mmspec.families.llamagen.modeling import (
    LlamaGenForCausalLM,
    LlamaGenModel,
    caption_prompt,
    class_prompt,
    encode_caption,
    null_caption_prompt,
)
from mmspec.plugins import Converter, Family

__all__ = [
    "FAMILIES",
    "CONTROLLED_LAYERS",
    "SIZES",
    "LlamaGenConfig",
    "LlamaGenForCausalLM",
    "LlamaGenModel",
    "caption_prompt",
    "class_prompt",
    "encode_caption",
    "null_caption_prompt",
]

AutoConfig.register(LlamaGenConfig.model_type, LlamaGenConfig, exist_ok=True)
AutoModel.register(LlamaGenConfig, LlamaGenModel, exist_ok=True)
AutoModelForCausalLM.register(LlamaGenConfig, LlamaGenForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "llamagen",
        "mmspec.families.llamagen.target:LlamaGenTarget",
        draws="tokens",
        answers=False,
        converter=Converter(
            "mmspec.families.llamagen.conversion:convert_checkpoint", refuses={"vae": "it goes with a MAR"}
        ),
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        generate="mmspec.families.llamagen.generation:generate_keywords",
    ),
)
