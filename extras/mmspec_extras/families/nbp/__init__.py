"""NBP (2502.07737): clips by next-block prediction, with the parts of PAR."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.plugins import Family
from mmspec_extras.families.nbp.modeling import NBPConfig, NBPForCausalLM, NBPModel

__all__ = ["FAMILIES", "NBPConfig", "NBPForCausalLM", "NBPModel"]

AutoConfig.register(NBPConfig.model_type, NBPConfig, exist_ok=True)
AutoModel.register(NBPConfig, NBPModel, exist_ok=True)
AutoModelForCausalLM.register(NBPConfig, NBPForCausalLM, exist_ok=True)

FAMILIES = (
    Family(
        "nbp",
        "mmspec_extras.families.nbp.target:NBPTarget",
        draws="tokens",
        answers=False,
        vq="diffusers.models.autoencoders.vq_model:VQModel",
        load="mmspec.families.llamagen.parts:load_llamagen",
        accelerator="none",
    ),
)
