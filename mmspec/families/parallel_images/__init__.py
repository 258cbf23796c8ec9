"""Image models that predict many cells in a forward: LPD (2507.01957), NAR (2503.10696), PAR (2412.15119).

VAR (2404.02905) predicts a scale in each. Importing it makes the auto classes of transformers know their
folders.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.families.parallel_images.configuration import (
    LPDConfig,
    NARConfig,
    ParallelImageConfig,
    PARConfig,
    VARConfig,
)
from mmspec.families.parallel_images.modeling import (
    LPDForCausalLM,
    LPDModel,
    NARForCausalLM,
    NARModel,
    PARForCausalLM,
    PARModel,
)
from mmspec.families.parallel_images.scales import VARForCausalLM, VARModel
from mmspec.plugins import Family

__all__ = [
    "FAMILIES",
    "LPDConfig",
    "LPDForCausalLM",
    "LPDModel",
    "NARConfig",
    "NARForCausalLM",
    "NARModel",
    "PARConfig",
    "PARForCausalLM",
    "PARModel",
    "ParallelImageConfig",
    "VARConfig",
    "VARForCausalLM",
    "VARModel",
]

for config, decoder, whole in (
    (LPDConfig, LPDModel, LPDForCausalLM),
    (NARConfig, NARModel, NARForCausalLM),
    (PARConfig, PARModel, PARForCausalLM),
    (VARConfig, VARModel, VARForCausalLM),
):
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, decoder, exist_ok=True)
    AutoModelForCausalLM.register(config, whole, exist_ok=True)

FAMILIES = (
    Family(
        "lpd",
        "mmspec.families.parallel_images.target:LPDTarget",
        draws="tokens",
        answers=False,
        vq_apart=True,
        accelerator="none",
    ),
    Family(
        "nar",
        "mmspec.families.parallel_images.target:NARTarget",
        draws="tokens",
        answers=False,
        vq_apart=True,
        accelerator="none",
    ),
    Family(
        "par",
        "mmspec.families.parallel_images.target:PARTarget",
        draws="tokens",
        answers=False,
        vq_apart=True,
        accelerator="none",
    ),
    Family(
        "var",
        "mmspec.families.parallel_images.scale_target:VARTarget",
        draws="tokens",
        answers=False,
        vq_apart=True,
        accelerator="none",
    ),
)
