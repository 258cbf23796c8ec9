"""The product of a gated feed-forward network: SiLU of the gate, times the other projection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from .backend import launcher, operator, tl, triton, use_triton_without_gradient

BLOCK = 1024


@operator(fake=lambda gate, up: gate.new_empty(gate.shape))
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute gate / (1 + exp(-gate)) * up (SwiGLU, 2002.05202), the quotient rounded to the dtype of gate.

    Args:
        gate, up: [..., d] of one shape and dtype.

    Returns:
        [..., d].
    """
    is_known = gate.dtype == up.dtype != torch.float64 and gate.shape == up.shape
    if is_known and use_triton_without_gradient(gate, up):
        return silu_mul_triton(gate, up)
    return silu(gate) * up


@launcher
def silu_mul_triton(gate: Tensor, up: Tensor) -> Tensor:
    """Launch `silu_mul`, with the same arguments."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    size = out.numel()
    if size:
        _silu_kernel[(triton.cdiv(size, BLOCK),)](gate.contiguous(), up.contiguous(), out, size, BLOCK=BLOCK)
    return out


@triton.jit
def _silu_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    dtype: tl.constexpr = gate.dtype
    gate = gate.to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(
        out_ptr + at, activated * tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32), mask=inside
    )
