"""NAR: images by anti-diagonals (2503.10696)."""

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
