"""CTF (2503.16194): a LlamaGen of coarse tokens, and a refiner of their fine ones."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.plugins import Family
from mmspec_extras.families.ctf.modeling import CTFConfig, CTFForCausalLM, CTFModel

__all__ = ["FAMILIES", "CTFConfig", "CTFForCausalLM", "CTFModel"]

AutoConfig.register(CTFConfig.model_type, CTFConfig, exist_ok=True)
AutoModel.register(CTFConfig, CTFModel, exist_ok=True)
AutoModelForCausalLM.register(CTFConfig, CTFForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "ctf",
        "mmspec_extras.families.ctf.target:CTFTarget",
        draws="tokens",
        answers=False,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
    ),
)
