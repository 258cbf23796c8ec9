"""Kernels for speculative decoding: Triton ops, each beside a twin in torch with the same numbers.

Knows nothing of models or methods. Imports torch, triton and einops only, and itself by relative imports, so
that the folder is also a Hugging Face Hub kernel.
"""

from .groups import cluster_ratio, rank_ratio, rank_ratio_at
from .neighbours import nearby_mass, nearby_prefix
from .philox import philox4x32, philox_gumbel, philox_uniform
from .similarity import merge_vectors, most_similar
from .windows import window_ratio

__all__ = [
    "cluster_ratio",
    "merge_vectors",
    "most_similar",
    "nearby_mass",
    "nearby_prefix",
    "philox4x32",
    "philox_gumbel",
    "philox_uniform",
    "rank_ratio",
    "rank_ratio_at",
    "window_ratio",
]
