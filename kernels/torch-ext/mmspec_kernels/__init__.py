"""Kernels for speculative decoding: Triton ops, each beside a twin in torch with the same numbers.

Knows nothing of models or methods. Imports torch, triton and einops only, and itself by relative imports, so
that the folder is also a Hugging Face Hub kernel.
"""

from .compact_cache import compact_cache
from .gated_delta import gated_delta_tree
from .philox import philox4x32, philox_gumbel, philox_uniform
from .sampling import Warping, is_fused, of_rows, race, sample_tokens, warp_logits, widen
from .tree_attention import tree_attention

__all__ = [
    "Warping",
    "compact_cache",
    "gated_delta_tree",
    "is_fused",
    "of_rows",
    "philox4x32",
    "philox_gumbel",
    "philox_uniform",
    "race",
    "sample_tokens",
    "tree_attention",
    "warp_logits",
    "widen",
]
