"""CTF (2503.16194): a LlamaGen of coarse tokens, and a refiner that predicts the fine tokens."""

from mmspec.families.llamagen import kin
from mmspec_extras.families.ctf.modeling import CTFForCausalLM

FAMILIES = (kin(CTFForCausalLM, "mmspec_extras.families.ctf.target:CTFTarget"),)
