"""PAR: images whose regions are drawn side by side (2412.15119)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.par.modeling import PARConfig, PARForCausalLM, PARModel
from mmspec.plugins import Family

__all__ = ["FAMILIES", "PARConfig", "PARForCausalLM", "PARModel"]

AutoConfig.register(PARConfig.model_type, PARConfig, exist_ok=True)
AutoModel.register(PARConfig, PARModel, exist_ok=True)
AutoModelForCausalLM.register(PARConfig, PARForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "par",
        "mmspec.families.par.target:PARTarget",
        draws="tokens",
        answers=False,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        official="mmspec.families.par.conversion:par_from_official",
        accelerator="none",
    ),
)
