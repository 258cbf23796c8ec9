"""NAR: image models that predict an anti-diagonal of cells per forward pass (2503.10696)."""

from mmspec.families.llamagen import kin
from mmspec.families.nar.modeling import NARForCausalLM

FAMILIES = (
    kin(
        NARForCausalLM,
        "mmspec.families.nar.target:NARTarget",
        official="mmspec.families.nar.conversion:nar_from_official",
        accelerator="none",
    ),
)
