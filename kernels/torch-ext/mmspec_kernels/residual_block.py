"""The two halves of a residual block with adaptive LayerNorm (2212.09748), as heads of diffusions have them.

With few rows such a block does little but read its weights, and two launches are all it takes. Statistics,
modulation and residual are at least in float32; operands of the products have the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from .backend import is_interpreted, operator, use_triton

INTERPRETED = is_interpreted()  # kernels read it once as well; asking again would cost as much as an op
MAX_ROWS = 64  # with more, the weights are no longer all that is read, and the BLAS of torch does better


@operator(fake=lambda x, scale, shift, weight, bias, eps, activate: _empty(scale, weight, weight.dtype))
def modulated_linear(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, eps: float, activate: bool
) -> Tensor:
    """Compute silu(weight (norm(x) * scale + shift) + bias), norm being LayerNorm without parameters.

    Args:
        x: [..., K], broadcasts to `scale`.
        scale, shift: [..., K].
        weight: [N, K].
        bias: [N].
        eps: of LayerNorm.
        activate: False to leave the SiLU out.

    Returns:
        [..., N] in the weights' dtype.
    """
    if _use_triton(x, scale, weight):
        from .residual_block_triton import modulated_linear_triton

        return modulated_linear_triton(x, scale, shift, weight, bias, eps, activate)
    normed = layer_norm(_precise(x), x.shape[-1:], eps=eps)
    out = linear(torch.addcmul(shift, normed, scale).to(weight.dtype), weight, bias)
    return silu(out) if activate else out


@operator(fake=lambda x, hidden, gate, weight, bias: _empty(gate, weight, _precise(x).dtype))
def gated_linear(x: Tensor, hidden: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x + gate * (weight hidden + bias).

    Args:
        x: [..., N], broadcasts to `gate`.
        hidden: [..., K] in the weights' dtype.
        gate: [..., N].
        weight: [N, K].
        bias: [N].

    Returns:
        [..., N] in the dtype of x, but at least in float32.
    """
    if _use_triton(x, gate, weight):
        from .residual_block_triton import gated_linear_triton

        return gated_linear_triton(x, hidden, gate, weight, bias)
    return torch.addcmul(_precise(x), gate, linear(hidden, weight, bias))


def _use_triton(x: Tensor, rows: Tensor, weight: Tensor) -> bool:
    """Return whether a kernel computes this: it has no gradient and no float64."""
    if (x.is_cpu and not INTERPRETED) or not use_triton(x.device):
        return False
    if rows.numel() > MAX_ROWS * rows.shape[-1]:
        return False
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not wants_gradient and torch.float64 not in (x.dtype, weight.dtype)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()


def _empty(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], len(weight), dtype=dtype)
