"""RMSNorm of decoder layers, alone or behind the addition of a residual.

One program per row holds the whole row in registers. Roundings are those of transformers' modules: statistics
in float32, the normalised row and its product with the weight in the dtype of the states. Gemma's norms are
centered: they multiply by 1 + weight in float32, and round once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton_without_gradient

LARGEST = 16_384  # elements of a row that a program holds
PER_WARP = 512


def _empty(x: Tensor, weight: Tensor, centered: bool) -> Tensor:
    dtype = x.dtype if centered else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


@operator(fake=lambda x, weight, eps, centered=False: _empty(x, weight, centered))
def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + eps) (RMSNorm, 1910.07467).

    Args:
        x: [..., d].
        weight: [d].
        eps: added to the mean.
        centered: whether the factor is 1 + weight.

    Returns:
        [..., d] in the wider dtype of x and weight, or of x if `centered`.
    """
    if _fits(x, weight) and use_triton_without_gradient(x, weight):
        return rms_norm_triton(x, weight, eps, centered)
    precise = x.to(torch.float32)
    precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
    if centered:
        return (precise * (1.0 + weight.float())).to(x.dtype)
    return weight * precise.to(x.dtype)


@operator(
    fake=lambda x, residual, weight, eps, centered=False: (
        x.new_empty(x.shape),
        _empty(x, weight, centered),
    )
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute s = residual + x, and `rms_norm` of s.

    Args:
        x, residual: [..., d] of one dtype.
        weight: [d].
        eps, centered: see `rms_norm`.

    Returns:
        s, which is the new residual, and its norm: two of [..., d].
    """
    if _fits(x, weight) and use_triton_without_gradient(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps, centered)
    total = residual + x
    return total, rms_norm(total, weight, eps, centered)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel computes states of this dtype and size."""
    return x.dtype == weight.dtype != torch.float64 and len(weight) <= LARGEST


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
    """Launch `rms_norm`, with the same arguments."""
    return _launch(x, None, None, weight, eps, centered)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """Launch `add_rms_norm`, with the same arguments."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _launch(x, residual.contiguous(), total, weight, eps, centered)


@launcher
def _launch(
    x: Tensor, residual: Tensor | None, total: Tensor | None, weight: Tensor, eps: float, centered: bool
) -> Tensor:
    size = len(weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = triton.next_power_of_2(size)
        _norm_kernel[(out.numel() // size,)](
            x.contiguous(),
            residual,
            weight.contiguous(),
            total,
            out,
            SIZE=size,
            EPS=eps,
            CENTERED=centered,
            BLOCK=block,
            num_warps=warps_of(block),
        )
    return out


def warps_of(block: int) -> int:
    """Warps of a program that holds so many elements."""
    return min(16, max(1, block // PER_WARP))


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,  # None to normalise x itself
    weight_ptr,
    total_ptr,  # None without a residual
    out_ptr,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    CENTERED: tl.constexpr,  # whether the factor is 1 + weight
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    if residual_ptr is not None:
        total = (tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32) + x).to(dtype)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / SIZE + EPS)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        weight += 1.0
    else:
        x = x.to(dtype).to(tl.float32)
    tl.store(out_ptr + at, weight * x, mask=inside)
