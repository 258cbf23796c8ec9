"""The product of a gated feed-forward network: the activated gate, times the other projection.

Both activations are x / (1 + exp(-s)): SiLU with s = x, GELU's tanh form with
s = 2 sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from .backend import launcher, operator, rows_together, tl, triton, use_triton_without_gradient

BLOCK = 1024


@operator(fake=lambda gate, up: gate.new_empty(gate.shape))
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up (SwiGLU, 2002.05202), the activation rounded to the dtype of gate.

    Args:
        gate, up: [..., d] of one shape and dtype; they may be slices of one tensor.

    Returns:
        [..., d].
    """
    return gated_product_triton(gate, up, False) if _fits(gate, up) else silu(gate) * up


@operator(fake=lambda gate, up: gate.new_empty(gate.shape))
def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute gelu(gate) * up (GEGLU, 2002.05202) with GELU's tanh form; otherwise as `silu_mul`."""
    if _fits(gate, up):
        return gated_product_triton(gate, up, True)
    return gelu(gate, approximate="tanh") * up


def _fits(gate: Tensor, up: Tensor) -> bool:
    is_known = gate.dtype == up.dtype != torch.float64 and gate.shape == up.shape
    return is_known and use_triton_without_gradient(gate, up)


@launcher
def gated_product_triton(gate: Tensor, up: Tensor, by_tanh: bool) -> Tensor:
    """Launch `silu_mul`, or `gelu_mul` if `by_tanh`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate, up = (
            rows_together(each).flatten(0, -2) if each.dim() > 1 else each[None] for each in (gate, up)
        )
        rows, size = gate.shape
        _gated_kernel[(rows, triton.cdiv(size, BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), size, TANH=by_tanh, BLOCK=BLOCK
        )
    return out


@triton.jit
def _gated_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,  # between rows
    up_stride,
    size,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0)
    dtype: tl.constexpr = gate.dtype
    gate = gate.to(tl.float32)
    slope = gate
    if TANH:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate / (1 + tl.exp(-slope))).to(dtype).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, activated * up, mask=inside)
