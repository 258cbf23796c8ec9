"""VAR: images scale by scale (2404.02905)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.var.modeling import VARConfig, VARForCausalLM, VARModel
from mmspec.plugins import Family

__all__ = ["FAMILIES", "VARConfig", "VARForCausalLM", "VARModel"]

AutoConfig.register(VARConfig.model_type, VARConfig, exist_ok=True)
AutoModel.register(VARConfig, VARModel, exist_ok=True)
AutoModelForCausalLM.register(VARConfig, VARForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "var",
        "mmspec.families.var.target:VARTarget",
        draws="tokens",
        answers=False,
        vq="mmspec.families.var.tokenizer:ScaleVQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        official="mmspec.families.var.conversion:var_from_official",
        accelerator="none",
    ),
)
