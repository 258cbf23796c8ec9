"""PAR: image models that decode the regions of an image in parallel (2412.15119)."""

from mmspec.families.llamagen import kin
from mmspec.families.par.modeling import PARForCausalLM

FAMILIES = (
    kin(
        PARForCausalLM,
        "mmspec.families.par.target:PARTarget",
        official="mmspec.families.par.conversion:par_from_official",
        accelerator="none",
    ),
)
