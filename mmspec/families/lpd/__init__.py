"""LPD: image models that predict any cells in parallel, by learned queries (2507.01957)."""

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
