"""VAR: image models that predict an image scale by scale (2404.02905)."""

from mmspec.families.llamagen import kin
from mmspec.families.var.modeling import VARForCausalLM

FAMILIES = (
    kin(
        VARForCausalLM,
        "mmspec.families.var.target:VARTarget",
        official="mmspec.families.var.conversion:var_from_official",
        vq="mmspec.families.var.tokenizer:ScaleVQModel",
        accelerator="none",
    ),
)
