"""Image models that predict many cells in a forward: LPD (2507.01957), NAR (2503.10696), PAR (2412.15119).

NBP (2502.07737) is PAR for clips.

Importing it makes the auto classes of transformers know their folders.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mmspec.models.parallel_images.configuration import (
    LPDConfig,
    NARConfig,
    NBPConfig,
    ParallelImageConfig,
    PARConfig,
)
from mmspec.models.parallel_images.modeling import (
    LPDForCausalLM,
    LPDModel,
    NARForCausalLM,
    NARModel,
    NBPForCausalLM,
    NBPModel,
    PARForCausalLM,
    PARModel,
)

__all__ = [
    "LPDConfig",
    "LPDForCausalLM",
    "LPDModel",
    "NARConfig",
    "NARForCausalLM",
    "NARModel",
    "NBPConfig",
    "NBPForCausalLM",
    "NBPModel",
    "PARConfig",
    "PARForCausalLM",
    "PARModel",
    "ParallelImageConfig",
]

for config, decoder, whole in (
    (LPDConfig, LPDModel, LPDForCausalLM),
    (NARConfig, NARModel, NARForCausalLM),
    (PARConfig, PARModel, PARForCausalLM),
    (NBPConfig, NBPModel, NBPForCausalLM),
):
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, decoder, exist_ok=True)
    AutoModelForCausalLM.register(config, whole, exist_ok=True)
