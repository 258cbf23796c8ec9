"""Kernels for speculative decoding: Triton ops, each beside a twin in torch with the same numbers.

Knows nothing of models or methods. Imports torch, triton and einops only, and itself by relative imports, so
that the folder is also a Hugging Face Hub kernel.
"""

from .gated_delta import gated_delta_tree
from .philox import philox4x32, philox_gumbel, philox_uniform
from .tree_attention import tree_attention

__all__ = ["gated_delta_tree", "philox4x32", "philox_gumbel", "philox_uniform", "tree_attention"]
