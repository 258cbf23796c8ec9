"""MAR: images of continuous tokens in any order, with a diffusion head (Li et al., 2406.11838)."""

from transformers import AutoConfig, AutoModel

from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration
from mmspec.plugins import Converter, Family

AutoConfig.register(MARConfig.model_type, MARConfig, exist_ok=True)
AutoModel.register(MARConfig, MARForImageGeneration, exist_ok=True)

FAMILIES = (
    Family(
        "mar",
        "mmspec.families.mar.target:MARTarget",
        draws="vectors",
        answers=False,
        load="mmspec.families.mar.conversion:load_parts",
        converter=Converter(
            "mmspec.families.mar.conversion:convert_mar",
            "mmspec.families.mar.conversion:is_mar",
            {
                "control_resize": "it applies to ControlAR alone",
                "image_size": "it is read from the weights of a MAR",
            },
        ),
        presets={"none": "masked"},
    ),
)
