"""NBP (2502.07737): clips by next-block prediction, with the parts of PAR."""

from mmspec.families.llamagen import kin
from mmspec_extras.families.nbp.modeling import NBPForCausalLM

FAMILIES = (kin(NBPForCausalLM, "mmspec_extras.families.nbp.target:NBPTarget", accelerator="none"),)
