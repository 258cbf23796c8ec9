"""Distilled Decoding (2412.17153): students that map noise to all tokens of an image at once."""

from mmspec.families.llamagen import kin
from mmspec_extras.families.distilled.modeling import DistilledForCausalLM

FAMILIES = (
    kin(DistilledForCausalLM, "mmspec_extras.families.distilled.target:DistilledTarget", accelerator="none"),
)
