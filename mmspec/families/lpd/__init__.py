"""LPD: images whose cells are asked for by learned queries, in any order (2507.01957)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.lpd.modeling import LPDConfig, LPDForCausalLM, LPDModel
from mmspec.plugins import Family

__all__ = ["FAMILIES", "LPDConfig", "LPDForCausalLM", "LPDModel"]

AutoConfig.register(LPDConfig.model_type, LPDConfig, exist_ok=True)
AutoModel.register(LPDConfig, LPDModel, exist_ok=True)
AutoModelForCausalLM.register(LPDConfig, LPDForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "lpd",
        "mmspec.families.lpd.target:LPDTarget",
        draws="tokens",
        answers=False,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        official="mmspec.families.lpd.conversion:lpd_from_official",
        accelerator="none",
    ),
)
