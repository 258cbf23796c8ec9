"""Kernels for speculative decoding: Triton ops, each beside a twin in torch with the same numbers.

Knows nothing of models or methods. Imports torch, triton and einops only, and itself by relative imports, so
that the folder is also a Hugging Face Hub kernel.
"""

from .compact_cache import compact_cache
from .philox import philox4x32, philox_gumbel, philox_uniform

__all__ = ["compact_cache", "philox4x32", "philox_gumbel", "philox_uniform"]
