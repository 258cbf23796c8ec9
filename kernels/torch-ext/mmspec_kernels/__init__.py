"""Kernels for speculative decoding: Triton ops, each beside a twin in torch with the same numbers.

Knows nothing of models or methods. Imports torch, triton and einops only, and itself by relative imports, so
that the folder is also a Hugging Face Hub kernel.
"""

from .denoising_update import denoising_transition, denoising_update
from .philox import philox4x32, philox_gumbel, philox_uniform
from .residual_block import gated_linear, modulated_linear

__all__ = [
    "denoising_transition",
    "denoising_update",
    "gated_linear",
    "modulated_linear",
    "philox4x32",
    "philox_gumbel",
    "philox_uniform",
]
