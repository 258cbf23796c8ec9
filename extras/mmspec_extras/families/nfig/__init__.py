"""NFIG (2503.07076): images by bands of frequency, with the transformer of VAR."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.plugins import Family
from mmspec_extras.families.nfig.modeling import NFIGConfig, NFIGForCausalLM, NFIGModel

__all__ = ["FAMILIES", "NFIGConfig", "NFIGForCausalLM", "NFIGModel"]

AutoConfig.register(NFIGConfig.model_type, NFIGConfig, exist_ok=True)
AutoModel.register(NFIGConfig, NFIGModel, exist_ok=True)
AutoModelForCausalLM.register(NFIGConfig, NFIGForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "nfig",
        "mmspec_extras.families.nfig.target:NFIGTarget",
        draws="tokens",
        answers=False,
        vq="mmspec.families.var.tokenizer:ScaleVQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        accelerator="none",
    ),
)
