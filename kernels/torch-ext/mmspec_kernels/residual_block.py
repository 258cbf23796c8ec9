"""The two halves of a residual block with adaptive LayerNorm (2212.09748), as in diffusion heads.

With few rows, reading the weights dominates the time of such a block, and two launches suffice. Statistics,
modulation and residual are at least in float32; operands of the products have the weights' dtype.

A program of a kernel computes BLOCK_M rows and BLOCK_N columns of a result, and reads BLOCK_N rows of the
weights. Tiles are narrow so that many programs stream the weights; each program recomputes the moments of its
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from .backend import INTERPRETED, launcher, operator, rows_together, tl, triton, use_triton_without_gradient

MAX_ROWS = 64  # with more rows reading the weights does not dominate, and torch's BLAS is faster
BLOCK_N = 32
STATISTICS = 8192  # elements of x per step of the moments
WARPS, STAGES = 4, 4


@operator(fake=lambda x, scale, shift, weight, bias, eps, activate: _empty(scale, weight, weight.dtype))
def modulated_linear(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, eps: float, activate: bool
) -> Tensor:
    """Compute silu(weight (norm(x) * scale + shift) + bias), where norm is LayerNorm without parameters.

    Args:
        x: [..., K], broadcasts to `scale`.
        scale, shift: [..., K].
        weight: [N, K].
        bias: [N].
        eps: epsilon of LayerNorm.
        activate: False omits the SiLU.

    Returns:
        [..., N] in the weights' dtype.
    """
    if _use_triton(x, scale, weight):
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
        return gated_linear_triton(x, hidden, gate, weight, bias)
    return torch.addcmul(_precise(x), gate, linear(hidden, weight, bias))


def _use_triton(x: Tensor, rows: Tensor, weight: Tensor) -> bool:
    """Return whether to run the kernel, which has no gradient and no float64."""
    if torch.float64 in (x.dtype, weight.dtype) or rows.numel() > MAX_ROWS * rows.shape[-1]:
        return False
    return use_triton_without_gradient(x, weight)


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()


def _empty(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], len(weight), dtype=dtype)


@launcher
def modulated_linear_triton(
    x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, eps: float, activate: bool
) -> Tensor:
    """Launch `modulated_linear`, with the same arguments."""
    size, width = weight.shape
    leading = scale.shape[:-1]
    out = torch.empty(*leading, size, dtype=weight.dtype, device=x.device)
    x, scale, shift = _repeated(x, leading), _rows(scale), _rows(shift)
    rows = len(scale)
    tile = tile_of(rows, weight.dtype)
    if rows:
        _modulated_linear_kernel[grid_of(rows, size, tile)](
            x,
            scale,
            shift,
            weight.contiguous(),
            bias.contiguous(),
            out,
            rows,
            len(x),
            scale.stride(0),
            shift.stride(0),
            N=size,
            K=width,
            EPS=eps,
            ACTIVATE=activate,
            UPCAST=INTERPRETED,
            BLOCK_S=STATISTICS // tile["BLOCK_M"],
            num_warps=WARPS,
            num_stages=STAGES,
            **tile,
        )
    return out


@launcher
def gated_linear_triton(x: Tensor, hidden: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Launch `gated_linear`, with the same arguments."""
    size, width = weight.shape
    leading = gate.shape[:-1]
    out = torch.empty(*leading, size, dtype=torch.float32, device=x.device)
    x, gate = _repeated(x, leading), _rows(gate)
    rows = len(gate)
    tile = tile_of(rows, weight.dtype)
    if rows:
        _gated_linear_kernel[grid_of(rows, size, tile)](
            x,
            hidden.expand(*leading, width).contiguous(),
            gate,
            weight.contiguous(),
            bias.contiguous(),
            out,
            rows,
            len(x),
            gate.stride(0),
            N=size,
            K=width,
            UPCAST=INTERPRETED,
            num_warps=WARPS,
            num_stages=STAGES,
            **tile,
        )
    return out


def tile_of(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes of a program. One tile has all rows if the registers allow it."""
    is_half = dtype.itemsize == 2
    height = max(16, min(64 if is_half else 32, triton.next_power_of_2(rows)))
    depth = 128 if is_half and height < 64 else 64
    return {"BLOCK_M": height, "BLOCK_N": BLOCK_N, "BLOCK_K": depth}


def grid_of(rows: int, size: int, tile: dict[str, int]) -> tuple[int, int]:
    """Number of programs along the columns and along the rows."""
    return triton.cdiv(size, tile["BLOCK_N"]), triton.cdiv(rows, tile["BLOCK_M"])


def _rows(x: Tensor) -> Tensor:
    """View [..., K] as [rows, K] with adjacent elements; copies if there is no such view."""
    return rows_together(x.reshape(-1, x.shape[-1]))


def _repeated(x: Tensor, leading: torch.Size) -> Tensor:
    """[x_rows, K] contiguous rows that repeat to `leading`; expands them only where needed."""
    if x.shape[-2:-1] == leading[-1:] and x.numel() == x.shape[-2:].numel():
        return x.reshape(x.shape[-2:]).contiguous()
    return x.expand(*leading, x.shape[-1]).reshape(-1, x.shape[-1]).contiguous()


@triton.jit
def _dot(left, right, sum, UPCAST: tl.constexpr):
    left = left.to(right.dtype)
    if UPCAST:  # Triton's interpreter cannot compute in bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sum, input_precision="ieee")


@triton.jit
def _load_weight(weight_ptr, column, k, N: tl.constexpr, K: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of the transposed weights."""
    inside = (k < K)[:, None] & (column < N)[None, :]
    return tl.load(weight_ptr + column[None, :] * K + k[:, None], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows", "x_rows"])
def _modulated_linear_kernel(
    x_ptr,  # [x_rows, K]: row r reads row r % x_rows
    scale_ptr,  # [rows, K]
    shift_ptr,  # [rows, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    out_ptr,  # [rows, N]
    rows,
    x_rows,
    scale_stride,
    shift_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (row < rows)[:, None]
    x_ptr += (row % x_rows)[:, None] * K
    # merged moments of parts of a row (Chan, Golub and LeVeque, 1979), as exact as reading it twice
    mean = tl.zeros((BLOCK_M,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, K, BLOCK_S):
        k = start + tl.arange(0, BLOCK_S)
        inside = (k < K)[None, :]
        x = tl.load(x_ptr + k[None, :], mask=exists & inside, other=0.0).to(tl.float32)
        count = tl.minimum(K - start, BLOCK_S)
        part = tl.sum(x, 1) / count
        x = tl.where(inside, x - part[:, None], 0.0)
        share = count / (start + count)
        apart = part - mean
        squares += tl.sum(x * x, 1) + apart * apart * (start * share)
        mean += apart * share
    mean = mean[:, None]
    slope = 1 / tl.sqrt(squares / K + EPS)[:, None]

    sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = exists & (k < K)[None, :]
        x = tl.load(x_ptr + k[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row[:, None] * scale_stride + k[None, :], mask=inside, other=0.0)
        shift = tl.load(shift_ptr + row[:, None] * shift_stride + k[None, :], mask=inside, other=0.0)
        hidden = (x - mean) * slope * scale.to(tl.float32) + shift.to(tl.float32)
        sum = _dot(hidden, _load_weight(weight_ptr, column, k, N, K), sum, UPCAST)
    sum += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATE:
        sum = sum / (1 + tl.exp(-sum))
    tl.store(out_ptr + row[:, None] * N + column[None, :], sum, mask=exists & (column < N)[None, :])


@triton.jit(do_not_specialize=["rows", "x_rows"])
def _gated_linear_kernel(
    x_ptr,  # [x_rows, N]: row r reads row r % x_rows
    hidden_ptr,  # [rows, K]
    gate_ptr,  # [rows, N]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    out_ptr,  # [rows, N]
    rows,
    x_rows,
    gate_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (row < rows)[:, None]
    sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = exists & (k < K)[None, :]
        hidden = tl.load(hidden_ptr + row[:, None] * K + k[None, :], mask=inside, other=0.0)
        sum = _dot(hidden, _load_weight(weight_ptr, column, k, N, K), sum, UPCAST)
    sum += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    inside = exists & (column < N)[None, :]
    x = tl.load(x_ptr + (row % x_rows)[:, None] * N + column[None, :], mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + column[None, :], mask=inside, other=0.0)
    out = x.to(tl.float32) + gate.to(tl.float32) * sum
    tl.store(out_ptr + row[:, None] * N + column[None, :], out, mask=inside)
