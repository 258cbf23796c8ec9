"""LPD: images whose cells are asked for by learned queries, in any order (2507.01957)."""

from mmspec.families.llamagen import kin
from mmspec.families.lpd.modeling import LPDForCausalLM

FAMILIES = (
    kin(
        LPDForCausalLM,
        "mmspec.families.lpd.target:LPDTarget",
        official="mmspec.families.lpd.conversion:lpd_from_official",
        accelerator="none",
    ),
)
