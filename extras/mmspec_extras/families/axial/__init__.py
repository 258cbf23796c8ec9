"""Axial transformers (1912.12180): an outer stack once per row of an image, an inner stack once per token."""

from mmspec.families.llamagen import kin
from mmspec_extras.families.axial.modeling import AxialForCausalLM

FAMILIES = (kin(AxialForCausalLM, "mmspec_extras.families.axial.target:AxialTarget", reader=None),)
