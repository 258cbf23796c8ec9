"""Kernels for speculative decoding: Triton ops, each beside a twin in torch with the same numbers.

Knows nothing of models or methods. Imports torch, triton and einops only, and itself by relative imports, so
that the folder is also a Hugging Face Hub kernel.
"""

from .best import best
from .compact_cache import compact_cache
from .philox import philox4x32, philox_gumbel, philox_uniform
from .tree import tree_children, tree_paths
from .tree_path import deepest_node, match_path, path_to
from .tree_rejection import descend, reject_tree

__all__ = [
    "best",
    "compact_cache",
    "deepest_node",
    "descend",
    "match_path",
    "path_to",
    "philox4x32",
    "philox_gumbel",
    "philox_uniform",
    "reject_tree",
    "tree_children",
    "tree_paths",
]
