"""NFIG (2503.07076): images by frequency bands, with VAR's transformer."""

from mmspec.families.llamagen import kin
from mmspec_extras.families.nfig.modeling import NFIGForCausalLM

FAMILIES = (
    kin(
        NFIGForCausalLM,
        "mmspec_extras.families.nfig.target:NFIGTarget",
        vq="mmspec_extras.families.nfig.tokenizer:BandVQModel",
        accelerator="none",
    ),
)
