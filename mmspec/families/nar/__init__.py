"""NAR: images by anti-diagonals (2503.10696)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.nar.modeling import NARConfig, NARForCausalLM, NARModel
from mmspec.plugins import Family

__all__ = ["FAMILIES", "NARConfig", "NARForCausalLM", "NARModel"]

AutoConfig.register(NARConfig.model_type, NARConfig, exist_ok=True)
AutoModel.register(NARConfig, NARModel, exist_ok=True)
AutoModelForCausalLM.register(NARConfig, NARForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "nar",
        "mmspec.families.nar.target:NARTarget",
        draws="tokens",
        answers=False,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        official="mmspec.families.nar.conversion:nar_from_official",
        accelerator="none",
    ),
)
