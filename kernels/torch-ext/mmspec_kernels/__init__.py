"""Triton kernels for speculative decoding; each op also has an equivalent implementation in torch.

The package is independent of models and methods. It imports only torch, triton and einops, and uses relative
imports, so that the folder is also a valid Hugging Face Hub kernel.
"""

from .chain import verify_chain
from .compact_cache import compact_cache
from .denoising_update import denoising_update
from .gated_delta import gated_delta_tree
from .gated_product import gelu_mul, silu_mul
from .groups import rank_ratio, rank_ratio_at
from .neighbours import nearby_mass, nearby_prefix
from .ordering import best
from .path_tokens import path_tokens, penalize_tokens
from .philox import philox4x32, philox_gumbel, philox_uniform
from .redraw import redraw
from .residual_block import gated_linear, modulated_linear
from .rms_norm import add_rms_norm, rms_norm
from .rotary_cache import rotate_into_cache
from .sampling import Warping, sample_tokens, warp_logits
from .tree import tree_children, tree_paths
from .tree_attention import tree_attention
from .tree_path import deepest_node, match_path, path_to
from .tree_rejection import reject_tree

__all__ = [
    "Warping",
    "add_rms_norm",
    "best",
    "compact_cache",
    "deepest_node",
    "denoising_update",
    "gated_delta_tree",
    "gated_linear",
    "gelu_mul",
    "match_path",
    "modulated_linear",
    "nearby_mass",
    "nearby_prefix",
    "path_to",
    "path_tokens",
    "penalize_tokens",
    "philox4x32",
    "philox_gumbel",
    "philox_uniform",
    "rank_ratio",
    "rank_ratio_at",
    "redraw",
    "reject_tree",
    "rms_norm",
    "rotate_into_cache",
    "sample_tokens",
    "silu_mul",
    "tree_attention",
    "tree_children",
    "tree_paths",
    "verify_chain",
    "warp_logits",
]

OPS = [name for name in __all__ if name != "Warping"]  # an argument class, not an op
